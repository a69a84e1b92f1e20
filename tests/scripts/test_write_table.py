from __future__ import annotations

import json
import runpy
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from runners.models.fused.candidates import candidates
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


def test_winners_of_whole_steps_replace_what_was_shipped_if_the_step_is_faster(tmp_path: Path) -> None:
    path, measured = tmp_path / TABLE.name, tmp_path / "measured.json"
    shutil.copy(TABLE, path)
    tile = asdict(Tile(16, 64, 128, early=True))

    def cell(rows: int, after_ms: float) -> dict[str, Any]:
        names = dict.fromkeys(DIMS.shapes(), "old")
        return {
            **{"model": DIMS.name, "num_rows": rows, "same_bits": True, "tiles": {"qkv": tile}},
            **{"before": names, "after": names | {"qkv": "new"}},
            **{"before_again_ms": 1.0, "after_again_ms": after_ms},
        }

    cells = {"faster": cell(8, 0.9), "slower": cell(32, 1.1)}
    measured.write_text(json.dumps({"product_cells": cells}))
    write_table(measured, path)
    table, before = WinnerTable.read(path), WinnerTable.read(TABLE)
    qkv, down = product_of(DIMS, "qkv"), product_of(DIMS, "down")
    entry = table.product("qkv", qkv, 8)
    assert entry is not None and recipe_of(entry).tile == Tile(**tile)
    assert table.product("qkv", qkv, 32) == before.product("qkv", qkv, 32)
    assert table.product("down", down, 8) == before.product("down", down, 8)
