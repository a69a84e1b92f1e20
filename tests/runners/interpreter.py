"""Triton's interpreter, for tests of kernels without a GPU."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch

needs_interpreter = pytest.mark.skipif(
    find_spec("triton") is None or torch.cuda.is_available(),
    reason="triton is not installed, or tests/gpu runs the compiled kernels",
)


@contextmanager
def interpreter() -> Iterator[Executor]:
    """A process of its own: the variable must be set before Triton is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            yield pool
