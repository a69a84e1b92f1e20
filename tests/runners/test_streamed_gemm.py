"""The streamed product kernel by Triton's interpreter; `tests/gpu/test_products.py` has it compiled."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor

import pytest

from runners.models.fused.skinny_gemm import Tile
from tests.runners.interpreter import interpreter, needs_interpreter
from tests.runners.product_case import check_product, random_product


@pytest.fixture(scope="module")
def kernels() -> Iterator[Executor]:
    with interpreter() as pool:
        yield pool


def _check(n: int, k: int, kind: str, tile: Tile, rows: int) -> str:
    return check_product(random_product(n, k, kind), tile, rows)


@needs_interpreter
@pytest.mark.parametrize("kind", ["scaled", "silu", "residual", "argmax"])
@pytest.mark.parametrize(
    "tile",
    [
        Tile(16, 16, 32, stages=3, early=True),
        Tile(16, 16, 32, splits=2, swap=True, early=True),
        Tile(16, 32, 64, splits=3, stages=2, early=True),
    ],
    ids=str,
)
def test_every_product_of_a_layer_is_its_twin_s(kernels: Executor, kind: str, tile: Tile) -> None:
    # Neither the outputs, nor the inner dimension, nor the rows fill the tiles.
    assert kernels.submit(_check, 40, 144, kind, tile, 19).result() == ""
