"""Our decode attention, compiled: against float32, and against itself launched otherwise."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from runners.attention.fragment_attention import FragmentAttentionTile
from runners.attention.triton_backend import AttentionTile, default_tile, tile_of
from runners.models.fused.launch import compile_ahead
from runners.models.fused.tuning import TABLES, WinnerTable
from tests.gpu.selected import parameters_of
from tests.runners.attention_case import LENGTHS, AttentionCase, Shape, Tile, check_tile

SHAPE = Shape(16, 8, 128)
TILE = AttentionTile(4, 16, 4, 3, heads=2, min_span=32)


@dataclass(frozen=True)
class Case:
    """A shape by a tile; `both` ways to launch it."""

    shape: Shape
    tile: Tile
    both: bool = False


def _shipped(heads: int, rows: int) -> Case:
    entry = WinnerTable.read(TABLES / "nvidia_h200_sm90.json").attention_entry(heads, 8, 128, rows)
    assert entry is not None
    return Case(replace(SHAPE, heads=heads), tile_of(entry["tile"]), both=True)


def _unmeasured(shape: Shape, rows: int) -> Case:
    row_bytes = shape.head_dim * shape.dtype.itemsize
    return Case(shape, default_tile(rows, shape.kv_heads, row_bytes))


CASES = [
    *(_shipped(heads, rows) for heads, rows in ((16, 1), (16, 8), (16, 32), (16, 128), (32, 1), (32, 128))),
    *(_unmeasured(SHAPE, rows) for rows in (1, 16, 256)),
    *(_unmeasured(replace(SHAPE, dtype=dtype), 16) for dtype in (torch.float16, torch.float32)),
    Case(Shape(9, 3, 64, page_size=1), TILE),
    Case(Shape(14, 2, 64, page_size=32, has_norm=False), TILE),
    Case(Shape(16, 8, 128, window=100, soft_cap=20.0), TILE),
    Case(Shape(16, 8, 128, page_size=32, window=37, fused=False), TILE),
    Case(Shape(8, 4, 256), TILE),
    _unmeasured(Shape(9, 3, 64, page_size=1), 1),
    _unmeasured(Shape(8, 4, 256), 1),
]
FRAGMENTS = [
    *(Case(SHAPE, FragmentAttentionTile(splits), both=True) for splits in (1, 2, 4, 8)),
    Case(SHAPE, FragmentAttentionTile(1, 8, 2, 1)),
    Case(replace(SHAPE, heads=32, page_size=32), FragmentAttentionTile(2, 2, 4, 3)),
    Case(replace(SHAPE, heads=8, has_norm=False, dtype=torch.float16), FragmentAttentionTile(4, 1, 4, 6)),
]
#: What the kernel does not serve: the other one takes the step.
NOT_FRAGMENTS = [
    Case(Shape(16, 8, 128, window=100), FragmentAttentionTile(2)),
    Case(Shape(16, 2, 128), FragmentAttentionTile(2)),
    Case(Shape(16, 8, 128, fused=False), FragmentAttentionTile(2)),
]


def _is_modern() -> bool:
    return torch.cuda.get_device_capability() >= (9, 0)


@pytest.fixture(scope="module", autouse=True)
def compiled_side_by_side(request: pytest.FixtureRequest) -> None:
    """The kernels of all cases that will run: one after the other they take minutes."""
    with compile_ahead():
        for parameters in parameters_of(request):
            case: Case = parameters["case"]
            attention = AttentionCase(case.shape, LENGTHS)
            for pdl in (True, False) if case.both and _is_modern() else (True,):
                attention.run(case.tile, pdl)


@pytest.mark.parametrize("case", [*CASES, *FRAGMENTS, *NOT_FRAGMENTS], ids=str)
def test_attention_by_each_tile_is_that_of_float32(case: Case) -> None:
    outcome = check_tile(case.shape, case.tile, case.both and _is_modern())
    assert not outcome["bad"], outcome


def test_fragments_serve_the_heads_that_they_are_made_for() -> None:
    if not _is_modern():
        pytest.skip("the kernel needs compute capability 9.0")
    served = [AttentionCase(case.shape, (5,)).backend.no_fragments for case in FRAGMENTS]
    refused = [AttentionCase(case.shape, (5,)).backend.no_fragments for case in NOT_FRAGMENTS[:2]]
    assert served == [None] * len(FRAGMENTS) and all(refused)
