"""Tests in this folder need a CUDA device, and say so where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder `gpu`; skip it, with the reason, without a device."""
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and this torch sees none"))


@pytest.fixture
def device() -> torch.device:
    """The device under test. Random numbers are the same in every test."""
    torch.manual_seed(0)
    return torch.device("cuda", torch.cuda.current_device())
