from __future__ import annotations

import json
import runpy
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from runners.attention.fragment_attention import FragmentAttentionTile
from runners.models.fused.candidates import candidates
from runners.models.fused.fragment_gemm import FragmentTile
from runners.models.fused.recipe import VENDOR
from runners.models.fused.skinny_gemm import Tile
from runners.models.fused.tuning import TABLES, WinnerTable, recipe_of
from tests.runners.test_fused_tuning import ALL_DIMS, product_of

ROOT = Path(__file__).parents[2]
TABLE = TABLES / "nvidia_h200_sm90.json"
MEASURED = ROOT / "docs" / "results" / "h200" / "fused_attention.json"


DIMS = ALL_DIMS["0.6b"]


def write_table(measured: Path, path: Path) -> None:
    """Run the script in this process: its imports would take longer than all it does."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(ROOT / "scripts")
        script = ROOT / "scripts" / "bench_fused.py"
        monkeypatch.setattr(sys, "argv", [str(script), str(measured), "--write-table", str(path)])
        runpy.run_path(str(script), run_name="__main__")


def test_the_shipped_table_is_what_the_command_writes_of_the_shipped_measurement(tmp_path: Path) -> None:
    path = tmp_path / TABLE.name
    shutil.copy(TABLE, path)
    write_table(MEASURED, path)
    assert path.read_text() == TABLE.read_text()


def test_a_shipped_tile_is_near_the_best_of_every_context_measured() -> None:
    table = WinnerTable.read(TABLE)
    for cell in json.loads(MEASURED.read_text())["attention_cells"].values():
        entry = table.attention_entry(16 if cell["model"] == "0.6b" else 32, 8, 128, cell["batch_size"])
        assert entry is not None and entry["measured_rows"] == cell["batch_size"]
        if entry["us_by_context"] is None:  # a winner of whole steps
            continue
        best, took = min(cell["attention_us"].values()), entry["us_by_context"][str(cell["context_len"])]
        assert took <= best * (1.03 if cell["context_len"] == 512 else 1.3), cell["context_len"]


def record(name: str, rows: int) -> dict[str, Any]:
    """What a run would have measured: the third candidate is the fastest."""
    recipe = str([VENDOR, *candidates(product_of(DIMS, name), rows)][2])
    n, k = DIMS.shapes()[name]
    return {
        **{"product": name, "num_rows": rows, "n": n, "k": k, "recipe": recipe},
        "candidate_us": {recipe: 4.256, str(VENDOR): 9.0},
    }


def test_a_run_fills_the_table_and_leaves_what_whole_steps_have_chosen(tmp_path: Path) -> None:
    path, measured = tmp_path / TABLE.name, tmp_path / "measured.json"
    before = json.loads(TABLE.read_text())
    for entry in before["products"]:
        if entry["rows"] != 8:
            entry["measured_rows"] = None
    before["products"] = [entry for entry in before["products"] if entry["rows"] != 24]
    path.write_text(json.dumps(before, indent=1))
    failed = record("qkv", 32) | {"candidate_us": {}}
    measured.write_text(
        json.dumps({"products": {DIMS.name: [*(record("qkv", rows) for rows in (8, 16, 24)), failed]}})
    )
    write_table(measured, path)
    assert json.loads(path.read_text())["attention"] == before["attention"]
    assert len(json.loads(path.read_text())["products"]) == len(before["products"]) + 1
    table, qkv = WinnerTable.read(path), product_of(DIMS, "qkv")
    for rows in (8, 32):
        assert table.product("qkv", qkv, rows) == WinnerTable(before).product("qkv", qkv, rows)
    for rows in (16, 24):
        entry = table.product("qkv", qkv, rows)
        assert entry is not None and (entry["us"], entry["measured_rows"]) == (4.26, rows)
        assert str(recipe_of(entry)) == record("qkv", rows)["recipe"]


def test_a_device_without_a_table_gets_one(tmp_path: Path) -> None:
    path, measured = tmp_path / "new.json", tmp_path / "measured.json"
    results = {"environment": {"device": "some card"}, "products": {DIMS.name: [record("qkv", 16)]}}
    measured.write_text(json.dumps(results))
    write_table(measured, path)
    table = WinnerTable.read(path)
    assert table.provenance["device"] == "some card"
    assert table.product("qkv", product_of(DIMS, "qkv"), 2) is not None
    assert table.product("down", product_of(DIMS, "down"), 2) is None


def step_cell(rows: int, after_ms: float = 0.9, **tiles: dict[str, Any] | None) -> dict[str, Any]:
    """A cell of `--only steps` in which `tiles` won; what it does not name stayed as the table has it."""
    table, before = WinnerTable.read(TABLE), {}
    for name in DIMS.shapes():
        entry = table.product(name, product_of(DIMS, name), rows)
        assert entry is not None
        before[name] = entry["tile"]
    names = dict.fromkeys([*before, "attention"], "old")
    return {
        **{"model": DIMS.name, "num_rows": rows, "same_bits": True, "tiles": before | tiles},
        **{"before": names, "after": names | dict.fromkeys(tiles, "new")},
        **{"before_again_ms": 1.0, "after_again_ms": after_ms, "ms_by_part": {name: {} for name in names}},
    }


def with_cells(tmp_path: Path, *cells: dict[str, Any]) -> Path:
    """The shipped table with the winners of `cells`."""
    path, measured = tmp_path / TABLE.name, tmp_path / "measured.json"
    if not path.exists():
        shutil.copy(TABLE, path)
    measured.write_text(json.dumps({"product_cells": {str(i): cell for i, cell in enumerate(cells)}}))
    write_table(measured, path)
    return path


STREAMED = asdict(Tile(16, 64, 128, early=True))
FRAGMENTS = asdict(FragmentTile(4, 2))


def test_winners_of_whole_steps_replace_what_was_shipped_if_the_step_is_faster(tmp_path: Path) -> None:
    cells = step_cell(8, qkv=STREAMED), step_cell(32, 1.1, qkv=STREAMED)
    table, before = WinnerTable.read(with_cells(tmp_path, *cells)), WinnerTable.read(TABLE)
    qkv, down = product_of(DIMS, "qkv"), product_of(DIMS, "down")
    entry = table.product("qkv", qkv, 8)
    assert entry is not None and recipe_of(entry).tile == Tile(**STREAMED)
    assert table.product("qkv", qkv, 32) == before.product("qkv", qkv, 32)
    assert table.product("down", down, 8) == before.product("down", down, 8)


def test_a_number_of_rows_that_the_table_had_none_of_gets_all_products_of_its_cell(tmp_path: Path) -> None:
    path = with_cells(tmp_path, step_cell(12, qkv=FRAGMENTS))
    table, before = WinnerTable.read(path), WinnerTable.read(TABLE)
    for name in DIMS.shapes():
        product = product_of(DIMS, name)
        entry, larger = table.product(name, product, 12), before.product(name, product, 12)
        assert entry is not None and larger is not None and larger["rows"] == 16
        assert (entry["rows"], entry["measured_rows"], entry["us"]) == (12, 12, None)
        assert entry["tile"] == (FRAGMENTS if name == "qkv" else larger["tile"])
        assert table.product(name, product, 16) == larger
    count = [
        sum(line.startswith('  {"product"') for line in p.read_text().splitlines()) for p in (path, TABLE)
    ]
    assert count[0] == count[1] + len(DIMS.shapes()), "an entry a line"


def test_an_entry_follows_the_rows_that_it_was_assumed_from_unless_it_has_a_cell(tmp_path: Path) -> None:
    qkv = product_of(DIMS, "qkv")

    def tiles(path: Path) -> list[tuple[Any, int]]:
        table = WinnerTable.read(path)
        entries = [entry for rows in (2, 4, 8) if (entry := table.product("qkv", qkv, rows))]
        return [(entry["tile"], entry["measured_rows"]) for entry in entries]

    assert {rows for _, rows in tiles(TABLE)} == {8}
    for cells in ((step_cell(8, qkv=STREAMED), step_cell(4)), (step_cell(4), step_cell(8, qkv=STREAMED))):
        (tmp_path / TABLE.name).unlink(missing_ok=True)
        assert tiles(with_cells(tmp_path, *cells)) == [(STREAMED, 8), (tiles(TABLE)[1][0], 4), (STREAMED, 8)]


def test_what_is_written_again_changes_nothing(tmp_path: Path) -> None:
    cells = step_cell(8, qkv=STREAMED, attention={"warps": 4}), step_cell(12, down=FRAGMENTS)
    once = with_cells(tmp_path, *cells).read_text()
    assert once != TABLE.read_text()
    assert with_cells(tmp_path, *cells).read_text() == once


def test_attention_that_won_within_whole_steps_goes_to_the_table_and_stays_there(tmp_path: Path) -> None:
    four, eight = asdict(FragmentAttentionTile(1, 4)), asdict(FragmentAttentionTile(2, 8, 2, 1))
    cells = step_cell(32, attention=four), step_cell(24, attention=eight), step_cell(1)
    path = with_cells(tmp_path, *cells)
    for again in range(2):
        table, before = WinnerTable.read(path), WinnerTable.read(TABLE)
        for rows, tile in ((32, four), (24, eight)):
            entry = table.attention_entry(16, 8, 128, rows)
            assert entry is not None and (entry["rows"], entry["tile"]) == (rows, tile)
            assert (entry["us"], entry["us_by_context"], entry["measured_rows"]) == (None, None, rows)
        for rows in (1, 16, 48):
            assert table.attention_entry(16, 8, 128, rows) == before.attention_entry(16, 8, 128, rows)
        assert table.attention_entry(32, 8, 128, 24) == before.attention_entry(32, 8, 128, 24)
        if not again:
            write_table(MEASURED, path)  # of attention alone


def test_a_winner_that_no_kernel_describes_any_more_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"0\.6b 8 rows: the winner of down, .* 'share'.*: measure these rows again"
    ):
        with_cells(tmp_path, step_cell(8, qkv=STREAMED, down=FRAGMENTS | {"share": 2}))
    assert (tmp_path / TABLE.name).read_text() == TABLE.read_text()


def test_a_part_that_was_not_searched_is_not_measured(tmp_path: Path) -> None:
    cell = step_cell(64, attention=asdict(FragmentAttentionTile(1, 4)))
    cell["ms_by_part"] = {"attention": {}}
    products = json.loads(with_cells(tmp_path, cell).read_text())["products"]
    assert products == json.loads(TABLE.read_text())["products"]
