"""The product kernels, compiled: against float32, and against themselves again."""

from __future__ import annotations

import pytest
import torch

from runners.models.fused.skinny_gemm import Tile
from tests.runners.product_case import check_product, random_product


@pytest.mark.parametrize("kind", ["scaled", "silu", "residual", "argmax"])
@pytest.mark.parametrize(
    "tile",
    [
        Tile(16, 64, 128, stages=4, early=True),
        Tile(16, 64, 128, splits=4, stages=4, prefetch=512, early=True),
        Tile(16, 64, 128, splits=4, stages=3, swap=True, early=True),
        Tile(32, 64, 512, splits=2, num_warps=8, stages=2, early=True),
        Tile(64, 64, 64, stages=5, num_warps=8, early=True),
        Tile(16, 64, 128, splits=4, stages=3, ahead=128, swap=True),
        Tile(32, 32, 512, splits=4, stages=0, ahead=512),
    ],
    ids=str,
)
def test_every_product_of_a_layer_is_its_twin_s(device: torch.device, kind: str, tile: Tile) -> None:
    pdl = torch.cuda.get_device_capability(device) >= (9, 0)
    for n, k, rows in ((512, 2048, 8), (1000, 2048, 31), (192, 4096, 70)):
        assert check_product(random_product(n, k, kind), tile, rows, pdl=pdl) == "", (n, k, rows)
