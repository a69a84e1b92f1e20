"""Which recipe a product runs by: from the table, or from a neighbour."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runners.attention.base import AttentionGroup
from runners.attention.fragment_attention import FragmentAttentionTile
from runners.errors import RunnerError
from runners.models.fused.candidates import candidates
from runners.models.fused.fragment_gemm import FragmentTile
from runners.models.fused.gemm_choice import PRODUCTS, ROW_BUCKETS, GemmChoice, _runnable, _thin, bucket
from runners.models.fused.recipe import VENDOR, Recipe
from runners.models.fused.skinny_gemm import Product, Tile
from runners.models.fused.tuning import TABLES, WinnerTable, _as_neighbour, _choose_products, recipe_of

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from fused_bench.rig import ALL_DIMS, Dims, random_decoder


def product_of(dims: Dims, name: str) -> Product:
    n, k = dims.shapes()[name]
    weight = torch.empty((2 if name == "gate_up" else 1) * n, k, dtype=torch.bfloat16, device="meta")
    return Product(weight, silu=name == "gate_up", residual=name in ("output", "down"), argmax=name == "head")


def test_a_batch_size_runs_in_the_smallest_bucket_that_holds_it() -> None:
    assert [bucket(n) for n in (1, 3, 17, 25, 33, 65, 129, 193, 256, 257)] == [
        1, 4, 24, 32, 48, 96, 160, 256, 256, None,
    ]  # fmt: skip


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_a_shipped_table_knows_each_product_at_each_number_of_rows(path: Path) -> None:
    table = WinnerTable.read(path)
    for dims in ALL_DIMS.values():
        for name in PRODUCTS:
            for rows in ROW_BUCKETS:
                entry = table.product(name, product_of(dims, name), rows)
                assert entry is not None and entry["rows"] >= rows
                assert_serves(recipe_of(entry).tile, product_of(dims, name), rows)


def assert_serves(tile: Tile | FragmentTile | None, product: Product, rows: int) -> None:
    if isinstance(tile, FragmentTile):
        assert tile.refusal(product, rows) is None
        assert tile.shared_bytes(rows) * tile.min_ctas <= 227 * 1024
    elif tile is not None:
        assert tile.block_m > 0 or rows == 1, "that kernel takes one row"
        assert tile.inputs_per_split(int(product.weight.shape[1]))


def test_a_tile_without_a_loop_is_refused_where_it_would_leave_inputs_out() -> None:
    tile = Tile(32, 32, 512, splits=4, stages=0, ahead=512)
    assert tile.inputs_per_split(2048) == 512
    with pytest.raises(
        ValueError, match="m32n32k512s4w4x0a512 has no loop and loads 512 .* of 4096 inputs has 1024"
    ):
        tile.inputs_per_split(4096)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("products", {"tile": {"turns": 2, "tiles": 1, "colour": 3}}, "TypeError: .*colour"),
        ("products", {"tile": {"turns": 2}}, "TypeError: .*tiles"),
        ("products", {"tile": {"turns": "2", "tiles": 1}}, "TypeError: turns='2' is no whole number"),
        ("products", {"tile": {"library": "magma"}}, "ValueError: the library 'magma' is none"),
        ("products", {"us": ...}, "KeyError: 'us'"),
        ("attention", {"tile": {"splits": 2, "warp": 4}}, "TypeError: .*warp"),
        ("attention", {"tile": None}, "TypeError: "),
        ("attention", {"head_dim": ...}, "KeyError: 'head_dim'"),
    ],
)
def test_a_table_with_an_entry_that_is_none_is_refused_with_its_name_and_the_entry(
    name: str, change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    content = json.loads(next(TABLES.glob("*.json")).read_text())
    changed = content[name][0] | change
    content[name][0] = {key: value for key, value in changed.items() if value is not ...}
    path = tmp_path / "table.json"
    path.write_text(json.dumps(content))
    with pytest.raises(RunnerError, match=rf"table.json: {name} has an entry that is none \({says}"):
        WinnerTable.read(path)


def test_a_table_of_another_type_or_shape_knows_nothing() -> None:
    table = WinnerTable.read(next(TABLES.glob("*.json")))
    wide = Product(torch.empty(4096, 1024, dtype=torch.float16, device="meta"))
    assert table.product("qkv", wide, 8) is None
    assert table.product("qkv", Product(wide.weight[:4000].bfloat16()), 8) is None


def test_what_is_not_measured_in_time_runs_as_its_neighbour_and_says_so() -> None:
    choice, small, large = GemmChoice(), Recipe(Tile(32, 32, 128)), Recipe(Tile(128, 32, 128))
    assert (_as_neighbour(choice, "qkv", 24).source, choice.recipe("qkv", 24)) == ("default", VENDOR)
    choice.recipes |= {
        ("qkv", 1): Recipe(Tile(0, 4, 512)), ("qkv", 32): small, ("qkv", 128): large,
    }  # fmt: skip
    for rows, recipe, nearest in ((2, small, 32), (24, small, 32), (48, large, 128), (256, large, 128)):
        row = _as_neighbour(choice, "qkv", rows)
        assert (row.source, row.recipe, row.measured_rows) == ("neighbour", str(recipe), nearest)
        assert choice.recipe("qkv", rows) == recipe


def test_a_tile_of_the_fragment_kernel_serves_no_more_rows_than_it_was_chosen_for() -> None:
    choice, fragment, many = GemmChoice(), Recipe(FragmentTile(2, 1)), Recipe(Tile(16, 32, 128))
    choice.recipes |= {("qkv", 8): many, ("qkv", 32): fragment, ("head", 32): fragment}
    for rows, recipe, nearest in ((2, many, 8), (24, fragment, 32), (48, many, 8)):
        row = _as_neighbour(choice, "qkv", rows)
        assert (row.recipe, row.measured_rows) == (str(recipe), nearest)
        del choice.recipes["qkv", rows]
    assert _as_neighbour(choice, "head", 64).recipe == str(VENDOR)


def test_a_recipe_of_the_table_that_cannot_run_here_is_not_used_and_the_record_says_why() -> None:
    dims = Dims("tiny", 256, 1, 2, 1, 64, 512, 300, False)
    model = random_decoder(dims, device=torch.device("cpu"))
    entries = [
        {
            **{"product": name, "n": n, "k": k, "rows": 8, "dtype": "bfloat16", "us": 2.5, "measured_rows": 8},
            "tile": {"turns": 1, "tiles": 1, "warps": 4} if name == "qkv" else {"block_m": 16, "block_n": 32, "block_k": 64},
        }
        for name, (n, k) in dims.shapes().items()
        if name in ("qkv", "down")
    ]  # fmt: skip
    table = WinnerTable({"provenance": {}, "products": entries, "attention": []})
    choices = {choice.product: choice for choice in _choose_products(model, table, 8, False, is_late=True)}
    assert set(choices) == set(PRODUCTS)
    assert (choices["qkv"].source, choices["qkv"].recipe) == ("default", str(VENDOR))
    assert choices["qkv"].refused == "it needs a CUDA device of capability 8.0"
    assert model.choice.recipe("qkv", 8) == VENDOR
    assert (choices["down"].source, choices["down"].measured_us, choices["down"].refused) == (
        "table",
        2.5,
        None,
    )
    assert (choices["head"].source, choices["head"].refused) == ("default", None)


def test_what_is_measured_without_a_table_is_half_fragment_tiles_where_they_run() -> None:
    recipes = candidates(product_of(ALL_DIMS["8b"], "down"), 8)
    few = _thin(recipes, 4)
    assert [isinstance(recipe.tile, FragmentTile) for recipe in few] == [True, True, False, False]
    assert len(set(few)) == 4
    plain = [recipe for recipe in recipes if not isinstance(recipe.tile, FragmentTile)]
    assert len(_thin(plain, 4)) == 4
    assert _thin(recipes, None) == recipes
    assert _runnable(product_of(ALL_DIMS["8b"], "down"), 8) == plain, "its weight lies on no CUDA device"


def test_an_attention_tile_that_does_not_fit_the_device_or_the_kernel_is_told_from_one_that_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups, device = [AttentionGroup(16, 8, 128, 1.0)], torch.device("cuda")
    room = SimpleNamespace(shared_memory_per_block_optin=227 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: room)
    assert FragmentAttentionTile(8, 4, 3, 2).refusal(groups, device) is None
    for numbers in ((3,), (16,), (0,), (2, 0), (2, 33), (2, 4, 0), (2, 4, 3, 0)):
        reason = FragmentAttentionTile(*numbers).refusal(groups, device)
        assert reason is not None and reason.startswith("its splits are 1, 2, 4 or 8")
    large = FragmentAttentionTile(2, 8, 4)
    needed = large.shared_bytes(2)
    assert large.refusal(groups, device) == (
        f"its CTAs need {needed} bytes of shared memory, and the device has {227 * 1024}"
    )
