"""What the fragment kernel takes, and how it is compiled. That it is right is a GPU test."""

from __future__ import annotations

import ctypes
import re
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runners.models.fused import fragment_gemm, nvrtc
from runners.models.fused.candidates import fragment_tiles
from runners.models.fused.fragment_gemm import (
    FragmentTile,
    outputs_of,
    padded_rows,
    product_fragment,
    unsupported,
)
from runners.models.fused.gemm_choice import PRODUCTS
from runners.models.fused.recipe import VENDOR, VENDOR_LT, Library, Recipe, refusal
from runners.models.fused.skinny_gemm import Product, Rows, Tile
from runners.models.fused.tuning import recipe_of
from tests.runners.kernel_source import argument_types, constants, needs_nvrtc, offsets
from tests.runners.test_fused_tuning import ALL_DIMS, product_of

SOURCE = Path(fragment_gemm.__file__).parent / "kernels" / "fragment_gemm.cu"
TILE = FragmentTile(2, 2, splits=2, warps=4, stages=3, part_tiles=2)
#: Of a multiprocessor of sm_90: bytes of shared memory (1 KiB of each CTA is the system's), registers, threads.
SHARED_BYTES, REGISTERS, THREADS = 228 * 1024, 65536, 2048


def product(n: int = 64, k: int = 1024, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> Product:
    return Product(torch.zeros((2 if fields.get("silu") else 1) * n, k, dtype=dtype), **fields)


@pytest.mark.parametrize(
    ("refused", "rows", "reason"),
    [
        (product(), 33, "33 rows are more than 32"),
        (product(dtype=torch.float32), 8, "it takes bfloat16 and float16"),
        (product(argmax=True), 8, "no arg max"),
        (product(norm=torch.ones(1024)), 8, "no norm that is not folded"),
        (product(silu=True, bias=torch.zeros(128)), 8, "no bias ahead of SiLU"),
        (product(k=2048), 8, "its clusters have 1024 inputs and the weight 2048"),
        (product(n=48), 8, "its CTAs have 32 outputs in parts of 2 tiles, of 48"),
    ],
    ids=lambda value: value.split(",")[0] if isinstance(value, str) else "",
)
def test_a_product_that_does_not_fit_is_refused_ahead_of_the_launch(
    refused: Product, rows: int, reason: str
) -> None:
    assert reason in (TILE.refusal(refused, rows) or "")
    x = torch.zeros(rows, refused.weight.shape[1], dtype=refused.weight.dtype)
    with pytest.raises(ValueError, match=f"tile {TILE} does not compute this product: .*{reason}"):
        product_fragment(Rows(x), refused, None, TILE)


def test_parts_of_a_sum_of_squares_are_whole_tiles_of_a_cta() -> None:
    assert TILE.refusal(product(), 32) is None
    assert replace(TILE, tiles=4, part_tiles=3).refusal(product(), 32) is not None
    assert replace(TILE, tiles=4, part_tiles=4).refusal(product(), 32) is None


@pytest.mark.parametrize("name", ["turns", "tiles", "splits", "warps", "stages", "part_tiles", "min_ctas"])
def test_a_tile_of_numbers_that_are_none_is_refused_before_anything_is_made_of_them(name: str) -> None:
    for tile in (replace(TILE, **{name: 0}), replace(TILE, **{name: -1})):
        assert "its numbers are at least 1" in (refusal(Recipe(tile), product(), 8) or "")


def test_a_tile_of_more_than_a_cluster_or_a_cta_holds_is_refused() -> None:
    for tile in (FragmentTile(1, 1, splits=16, warps=1), FragmentTile(1, 1, splits=1, warps=64)):
        wide = product(k=tile.splits * tile.cta_inputs)
        assert "its splits at most 8, its warps 32" in (tile.refusal(wide, 8) or "")


@pytest.mark.parametrize(("splits", "least"), [(1, "8.0"), (2, "9.0")])
def test_without_a_device_it_says_what_it_needs(splits: int, least: str) -> None:
    found = unsupported(torch.device("cpu"), replace(TILE, splits=splits), 8)
    assert found == f"it needs a CUDA device of capability {least}"


def test_a_device_whose_multiprocessors_have_less_shared_memory_is_told_from_one_that_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large, device = FragmentTile(2, 6, 1, warps=16, stages=4, min_ctas=1), torch.device("cuda")
    room = SimpleNamespace(shared_memory_per_block_optin=163 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: room)
    monkeypatch.setattr(nvrtc, "is_available", lambda: True)
    assert unsupported(device, large, 8) is None
    assert unsupported(device, large, 32) == (
        f"its CTAs need {large.shared_bytes(32)} bytes of shared memory, and the device has 166912"
    )
    assert unsupported(device, replace(large, splits=2), 8) == "it needs a CUDA device of capability 9.0"
    monkeypatch.setattr(nvrtc, "is_available", lambda: False)
    assert unsupported(device, large, 8) == "cuda-bindings or the NVRTC library is missing"


# --- the kernel's source ------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 5, 8, 13, 24, 31, 32])
@pytest.mark.parametrize("splits", [1, 2, 3, 4, 8])
def test_the_shared_memory_asked_for_is_what_the_source_lays_out(rows: int, splits: int) -> None:
    tile = FragmentTile(2, 3, splits, warps=12, stages=5, part_tiles=3)
    named = asdict(tile)
    defines = {"ROWS": padded_rows(rows), "SILU": 0} | {name.upper(): value for name, value in named.items()}
    size = constants(SOURCE, defines)
    copies, partial, sums = offsets(
        SOURCE,
        size,
        r"float\* partial = reinterpret_cast<float\*>\(shared \+ (.*?)\);",
        r"float\* sums = partial \+ (.*?);",
        r"float\* scale = sums \+ (.*?);  // \[ROWS\]",
    )
    assert tile.shared_bytes(rows) == copies + 4 * (partial + sums + size["ROWS"])
    assert tile.cta_inputs == size["CTA_INPUTS"]


def test_arguments_are_those_of_the_source_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(fragment_gemm, "launch_cuda", lambda *a, **k: calls.append((a, k)))
    some = product(silu=True, scaled=True, eps=1e-6)
    x = torch.zeros(5, 1024, dtype=torch.bfloat16)
    out = product_fragment(Rows(x, torch.ones(5, 7)), some, None, TILE, pdl=True)
    ((source, name, defines, arguments), options) = calls[0]
    assert (source, name, out.rows.x.shape, out.rows.squares) == (SOURCE, "fragment_gemm", (5, 64), None)
    assert [type(argument) for argument in arguments] == argument_types(SOURCE, "fragment_gemm")
    assert arguments[-4:] == (5, 7, 64, 1e-6)
    assert options["grid"] == 64 // (outputs_of(some) * TILE.tiles) * TILE.splits
    assert (options["threads"], options["cluster"], options["pdl"]) == (128, 2, True)
    assert options["shared_bytes"] == TILE.shared_bytes(5)
    words = set(re.findall(r"\b[A-Z_]+\b", SOURCE.read_text()))
    assert set(defines) <= words
    assert (defines["ROWS"], defines["SILU"], defines["SCALED"], defines["RESIDUAL"]) == (8, 1, 1, 0)


def test_an_argument_is_passed_as_its_type_says() -> None:
    x = torch.zeros(3)
    values, types = nvrtc._packed((x, 3, 0.5))
    assert values == (x.data_ptr(), 3, 0.5)
    assert types == (ctypes.c_void_p, ctypes.c_int, ctypes.c_float)


def test_a_call_that_failed_raises_and_one_that_did_not_returns_the_rest() -> None:
    assert (nvrtc._checked((0, 7)), nvrtc._checked((0,))) == (7, None)
    with pytest.raises(RuntimeError, match="CUDA: 209"):
        nvrtc._checked((209, None))


# --- tiles to try -------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", ALL_DIMS.values(), ids=lambda dims: dims.name)
@pytest.mark.parametrize("rows", [1, 8, 13, 16, 24, 32])
def test_every_tile_to_try_divides_the_product_and_fits_a_multiprocessor(dims: Any, rows: int) -> None:
    for name in PRODUCTS:
        some = product_of(dims, name)
        tiles = fragment_tiles(some, rows)
        assert bool(tiles) == (name != "head")
        for tile in tiles:
            assert tile.refusal(some, rows) is None
            assert tile.stages >= 1 and tile.splits <= 8, "as many CTAs as a cluster may have everywhere"
            assert tile.min_ctas * (tile.shared_bytes(rows) + 1024) <= SHARED_BYTES
            assert tile.min_ctas * 32 * tile.warps <= THREADS and tile.warps <= 32
            # x of a warp's share is held in registers, beside sums, addresses and fragments of the weight.
            assert tile.min_ctas * 32 * tile.warps * (padded_rows(rows) * tile.turns + 40) <= REGISTERS


def test_there_is_none_for_more_rows_than_the_kernel_takes() -> None:
    assert not fragment_tiles(product_of(ALL_DIMS["0.6b"], "qkv"), 33)


def test_a_recipe_is_of_the_kernel_whose_fields_its_entry_has() -> None:
    skinny = Tile(16, 64, 128, early=True)
    assert recipe_of({"tile": asdict(TILE)}) == Recipe(TILE)
    assert recipe_of({"tile": asdict(skinny)}) == Recipe(skinny)
    assert recipe_of({"tile": None}) == VENDOR
    assert recipe_of({"tile": asdict(Library())}) == VENDOR_LT
    assert (str(Recipe(TILE)), str(VENDOR), str(VENDOR_LT)) == ("frag2t2s2w4x3p2o2", "cublas", "cublaslt")


# --- the compiler -------------------------------------------------------------------------------


def defines_of(tile: FragmentTile, rows: int, **flags: int) -> tuple[tuple[str, int], ...]:
    named = {name.upper(): value for name, value in asdict(tile).items()}
    zeros = dict.fromkeys(("ELEMENT", "SCALED", "RESIDUAL", "SILU", "BIAS", "PDL"), 0)
    return tuple((zeros | named | {"ROWS": padded_rows(rows)} | flags).items())


@needs_nvrtc
@pytest.mark.parametrize(
    "flags", [{"SCALED": 1, "SILU": 1, "PDL": 1}, {"RESIDUAL": 1, "BIAS": 1, "ELEMENT": 1}]
)
@pytest.mark.parametrize(
    "tile", [TILE, FragmentTile(1, 1, 3, warps=8, stages=1), FragmentTile(4, 12, 1, 16, 6, 4, 1)]
)
def test_the_source_compiles_for_a_hopper(tile: FragmentTile, flags: dict[str, int]) -> None:
    assert nvrtc.compile_cubin(SOURCE, "sm_90", defines_of(tile, 13, **flags)).startswith(b"\x7fELF")


@needs_nvrtc
def test_what_the_compiler_refuses_is_an_error_with_its_log() -> None:
    defines = dict(defines_of(TILE, 8))
    del defines["STAGES"]
    with pytest.raises(RuntimeError, match=r"NVRTC refused fragment_gemm.cu: ") as caught:
        nvrtc.compile_cubin(SOURCE, "sm_90", tuple(defines.items()))
    message = str(caught.value)
    assert "\0" not in message
    assert '"STAGES" is undefined' in message[:200], "a record keeps no more of it"


@pytest.mark.skipif(nvrtc.is_available(), reason="the bindings and the NVRTC library are there")
def test_without_the_bindings_nothing_is_compiled() -> None:
    with pytest.raises((ImportError, RuntimeError)):
        nvrtc.compile_cubin(SOURCE, "sm_90", defines_of(TILE, 8))
