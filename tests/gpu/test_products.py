"""The product kernels, compiled: against float32, and against themselves again."""

from __future__ import annotations

import pytest
import torch

from runners.models.fused.launch import compile_ahead
from runners.models.fused.skinny_gemm import Tile
from tests.gpu.selected import parameters_of
from tests.runners.product_case import check_product, random_product

#: Outputs, inputs and rows: whole tiles, a part of one, and several row tiles.
SIZES = ((512, 2048, 8), (1000, 2048, 31), (192, 4096, 70))
TILES = [
    Tile(16, 64, 128, stages=4, early=True),
    Tile(16, 64, 128, splits=4, stages=4, prefetch=512, early=True),
    Tile(16, 64, 128, splits=4, stages=3, swap=True, early=True),
    Tile(32, 64, 512, splits=2, num_warps=8, stages=2, early=True),
    Tile(64, 64, 64, stages=5, num_warps=8, early=True),
    Tile(16, 64, 128, splits=4, stages=3, ahead=128, swap=True),
    Tile(32, 32, 512, splits=4, stages=0, ahead=512),
]


def _check(kind: str, tile: Tile) -> list[str]:
    """What is wrong at each size that the tile can compute: one without a loop has all inputs loaded ahead."""
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    sizes = [size for size in SIZES if tile.stages or size[1] <= tile.splits * tile.ahead]
    return [check_product(random_product(n, k, kind), tile, rows, pdl=pdl) for n, k, rows in sizes]


@pytest.fixture(scope="module", autouse=True)
def compiled_side_by_side(request: pytest.FixtureRequest) -> None:
    """The kernels of all tests that will run: one after the other they take minutes."""
    with compile_ahead():
        for parameters in parameters_of(request):
            _check(parameters["kind"], parameters["tile"])  # of garbage: no kernel runs


@pytest.mark.parametrize("kind", ["scaled", "silu", "residual", "argmax"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_product_of_a_layer_is_its_twin_s(device: torch.device, kind: str, tile: Tile) -> None:
    found = _check(kind, tile)
    assert len(found) >= 2 and not any(found)
