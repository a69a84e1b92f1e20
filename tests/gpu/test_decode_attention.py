"""Our decode attention, compiled: against float32, and against itself launched otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from runners.attention.triton_backend import AttentionTile, default_tile
from runners.models.fused.tuning import TABLES, WinnerTable
from tests.runners.attention_case import Shape, check_tile

SHAPE = Shape(16, 8, 128)
TILE = AttentionTile(4, 16, 4, 3, heads=2, min_span=32)


def _check(shape: Shape, tile: AttentionTile) -> None:
    outcome = check_tile(shape, tile, torch.cuda.get_device_capability() >= (9, 0))
    assert not outcome["bad"], outcome


@pytest.mark.parametrize("rows", [1, 8, 32, 128])
@pytest.mark.parametrize("heads", [16, 32])
def test_the_shipped_tiles(heads: int, rows: int) -> None:
    entry = WinnerTable.read(TABLES / "nvidia_h200_sm90.json").attention_entry(heads, 8, 128, rows)
    assert entry is not None
    _check(replace(SHAPE, heads=heads), AttentionTile(**entry["tile"]))


@pytest.mark.parametrize("rows", [1, 16, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_tiles_where_nothing_was_measured(dtype: torch.dtype, rows: int) -> None:
    _check(replace(SHAPE, dtype=dtype), default_tile(rows, 8, SHAPE.head_dim * dtype.itemsize))


@pytest.mark.parametrize(
    "shape",
    [
        Shape(9, 3, 64, page_size=1),
        Shape(14, 2, 64, page_size=32, has_norm=False),
        Shape(16, 8, 128, window=100, soft_cap=20.0),
        Shape(16, 8, 128, page_size=32, window=37, fused=False),
        Shape(8, 4, 256),
    ],
    ids=str,
)
def test_every_option_of_a_model_and_its_cache(shape: Shape) -> None:
    _check(shape, TILE)
    _check(shape, default_tile(1, shape.kv_heads, 2 * shape.head_dim))
