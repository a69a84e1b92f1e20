"""Launches Triton kernels, or only has them compiled, several at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

_MAX_THREADS = 16
_compiles_only = False


def launch_options(pdl: bool, **options: int) -> dict[str, int | bool]:
    """`options`, and the launch attribute when `pdl`: the interpreter does not know it."""
    return {**options, "launch_pdl": True} if pdl else dict(options)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Queue `kernel` on the current stream; within `compile_ahead` only compile it."""
    if _compiles_only:
        kernel.warmup(*arguments, grid=grid, **options)
    else:
        kernel[grid](*arguments, **options)


def compiles_only() -> bool:
    """Whether a kernel that is asked for should be compiled and not run: see `compile_ahead`."""
    return _compiles_only


@contextmanager
def compile_ahead() -> Iterator[None]:
    """Within the block no kernel of ours runs: each is compiled, and the block's end waits for all.

    So a step may be called for its launches alone; what it returns is garbage. Where Triton can it
    compiles in threads, which spend their time outside of Python.
    """
    global _compiles_only
    import triton

    mode = getattr(triton, "AsyncCompileMode", None)
    with ExitStack() as stack:
        if mode is not None:
            threads = min(_MAX_THREADS, os.cpu_count() or 1)
            stack.enter_context(mode(stack.enter_context(ThreadPoolExecutor(threads))))
        _compiles_only = True
        try:
            yield
        finally:
            _compiles_only = False
