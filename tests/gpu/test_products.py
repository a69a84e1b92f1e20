"""The product kernels, compiled: against float32, and against themselves again."""

from __future__ import annotations

import pytest
import torch

from runners.models.fused.fragment_gemm import FragmentTile, unsupported
from runners.models.fused.launch import compile_ahead
from runners.models.fused.recipe import VENDOR, Library, _late_scale, run_product
from runners.models.fused.skinny_gemm import Rows, Tile
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
#: 1 to 8 CTAs of a cluster, few and many warps, parts of several tiles.
FRAGMENTS = [
    FragmentTile(2, 1, 1, warps=8, stages=2),
    FragmentTile(1, 4, 1, warps=16, stages=4, part_tiles=2, min_ctas=1),
    FragmentTile(2, 2, 2, warps=4, stages=3, part_tiles=2, min_ctas=4),
    FragmentTile(1, 1, 3, warps=12, stages=1),
    FragmentTile(1, 12, 4, warps=8, stages=8, part_tiles=4),
    FragmentTile(1, 3, 8, warps=4, stages=2, part_tiles=3, min_ctas=4),
    FragmentTile(4, 6, 2, warps=8, stages=6, part_tiles=3, min_ctas=1),
]
#: Of all these tiles, with SiLU too: whole ones.
_FRAGMENT_OUTPUTS = 960
_FRAGMENT_ROWS = (1, 5, 8, 13, 24, 31, 32)


def _check(kind: str, tile: Tile | FragmentTile, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """What is wrong at each size."""
    if isinstance(tile, FragmentTile):
        return _check_fragments(kind, tile, dtype)
    return _check_tile(kind, tile)


def _check_fragments(kind: str, tile: FragmentTile, dtype: torch.dtype) -> list[str]:
    """`kind` may end in ` bias`; with and without dependent launch, whose kernels differ."""
    if _without_fragments(tile):
        return []
    product = random_product(
        _FRAGMENT_OUTPUTS, tile.splits * tile.cta_inputs, kind.split()[0], dtype, kind.endswith(" bias")
    )
    # Fewer sums of squares than a warp has threads, and more.
    return [
        check_product(product, tile, rows, width, pdl=pdl)
        for rows in _FRAGMENT_ROWS
        for width, pdl in ((7, False), (200, True))
    ]


def _without_fragments(tile: FragmentTile) -> str | None:
    """Why the fragment kernel is not tested here."""
    if torch.cuda.get_device_capability() < (9, 0):
        return "clusters and dependent launch need compute capability 9.0"
    return unsupported(torch.device("cuda", torch.cuda.current_device()), tile, max(_FRAGMENT_ROWS))


def _check_tile(kind: str, tile: Tile) -> list[str]:
    """What is wrong at each size that the tile can compute: one without a loop has all inputs loaded ahead."""
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    sizes = [size for size in SIZES if tile.stages or size[1] <= tile.splits * tile.ahead]
    return [check_product(random_product(n, k, kind), tile, rows, pdl=pdl) for n, k, rows in sizes]


@pytest.fixture(scope="module", autouse=True)
def compiled_side_by_side(request: pytest.FixtureRequest) -> None:
    """The kernels of all tests that will run: one after the other they take minutes."""
    with compile_ahead():
        for parameters in parameters_of(request):
            if "tile" in parameters:
                _check(**parameters)  # of garbage: no kernel runs


@pytest.mark.parametrize("kind", ["scaled", "silu", "residual", "argmax"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_product_of_a_layer_is_its_twin_s(device: torch.device, kind: str, tile: Tile) -> None:
    found = _check(kind, tile)
    assert len(found) >= 2 and not any(found)


@pytest.mark.parametrize("kind", ["scaled", "silu", "residual", "scaled bias", "residual bias"])
@pytest.mark.parametrize("tile", FRAGMENTS, ids=str)
def test_every_product_by_fragments_is_its_twin_s(
    device: torch.device, kind: str, tile: FragmentTile
) -> None:
    if reason := _without_fragments(tile):
        pytest.skip(reason)
    found = _check(kind, tile)
    assert len(found) == 2 * len(_FRAGMENT_ROWS) and not any(found)


@pytest.mark.parametrize("dtype", [torch.float16])
@pytest.mark.parametrize("kind", ["scaled", "silu", "residual bias"])
@pytest.mark.parametrize("tile", FRAGMENTS[1:5:3], ids=str)
def test_fragments_of_float16_are_as_exact(
    device: torch.device, kind: str, tile: FragmentTile, dtype: torch.dtype
) -> None:
    if reason := _without_fragments(tile):
        pytest.skip(reason)
    assert not any(_check(kind, tile, dtype))


@pytest.mark.parametrize("kind", ["scaled", "silu", "residual", "argmax"])
def test_both_of_the_vendor_s_libraries_are_their_twin_s(device: torch.device, kind: str) -> None:
    before = torch.backends.cuda.preferred_blas_library()
    wrong = [
        check_product(random_product(512, 1024, kind), library, rows)
        for library in (None, Library("cublaslt"))
        for rows in (1, 13, 128)
    ]
    assert not any(wrong)
    assert torch.backends.cuda.preferred_blas_library() == before


@pytest.mark.parametrize("rows", [1, 13, 32, 200])
def test_the_vendor_s_product_may_be_normed_after_it(device: torch.device, rows: int) -> None:
    """The kernel behind it applies the scale, where the sums of squares are known."""
    product = random_product(512, 1024, "silu")
    x = torch.zeros(rows, 1024, dtype=torch.bfloat16, device=device)
    assert _late_scale(Rows(x, torch.ones(rows, 64, device=device)), product) is not None
    assert _late_scale(Rows(x), product) is None
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    assert not any(check_product(product, None, rows, width, pdl=pdl) for width in (7, 64, 200))


def test_the_vendor_s_product_of_float16_is_normed_ahead(device: torch.device) -> None:
    """What was not normed may be beyond its range."""
    product = random_product(512, 1024, "silu", torch.float16)
    x = torch.full((8, 1024), 6e4, dtype=torch.float16, device=device)
    squares = x.float().square().sum(1, keepdim=True)
    assert _late_scale(Rows(x, squares), product) is None
    assert run_product(Rows(x, squares), product, VENDOR).rows.x.isfinite().all()
    assert not check_product(product, None, 8)
