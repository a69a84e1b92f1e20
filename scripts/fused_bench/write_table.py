"""Writes what was measured into a device's table: `bench_fused.py IN.json --write-table TABLE`.

Of products that is the fastest at each number of rows (`product_table`). Of attention: a captured graph keeps
its tile for requests of every length, and nobody knows at capture how long they will be. So there is one tile
for a number of rows: the one whose time, over the best of each context measured, has the smallest geometric
mean. The context of the published results counts twice. A tile that won within whole steps (`us` null, measured
at its own rows) stays.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fused_bench.product_table import is_better, with_products, with_steps
from fused_bench.rig import ALL_DIMS, CONTEXT
from runners.attention.triton_backend import AttentionTile
from runners.models.fused.gemm_choice import ROW_BUCKETS

_MAX_SPLITS = 16
_START = ' "products": [\n'


def write_table(measured: Path, path: Path) -> None:
    """Put the products and the attention of the bench's file `measured` into the table at `path`, or a new one."""
    results = json.loads(measured.read_text())
    text = path.read_text() if path.exists() else _new_table(results)
    table = json.loads(text)
    products = with_products(table["products"], results.get("products", {}))
    products = with_steps(products, results.get("product_cells", {}))
    attention = _with_attention(table["attention"], results.get("attention_cells", {}))
    attention = _with_step_attention(attention, results.get("product_cells", {}))
    # What stands before the entries as it was.
    head = text[: text.index(_START)]
    path.write_text(f'{head} "products": {_lines(products)},\n "attention": {_lines(attention)}\n}}\n')


def _new_table(results: Mapping[str, Any]) -> str:
    provenance = {
        **results["environment"],
        "command": "python scripts/bench_fused.py OUT.json --only products",
    }
    return f'{{\n "provenance": {json.dumps(provenance)},\n "products": [\n ],\n "attention": []\n}}\n'


def _lines(entries: list[dict[str, Any]]) -> str:
    """An entry a line, so that a change is a line of the diff."""
    return "[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in entries) + "\n ]"


def _with_attention(
    entries: list[dict[str, Any]], measured: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The table's attention, that of the models measured replaced, except winners of whole steps."""
    cells: dict[tuple[str, int], list[Any]] = {}
    for cell in measured.values():
        cells.setdefault((cell["model"], cell["batch_size"]), []).append(cell)
    new = [entry for name in dict.fromkeys(name for name, _ in cells) for entry in _entries(name, cells)]
    kept = {_heads_and_rows(e): e for e in entries if e["us"] is None and e["measured_rows"] == e["rows"]}
    return [entry for entry in entries if _heads(entry) not in set(map(_heads, new))] + [
        kept.get(_heads_and_rows(entry), entry) for entry in new
    ]


def _with_step_attention(
    entries: list[dict[str, Any]], cells: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The entries with the attention of `--only steps`, where it changed and the whole step is faster."""
    merged = {_heads_and_rows(entry): entry for entry in entries}
    for cell in filter(is_better, cells.values()):
        if cell["before"].get("attention") == cell["after"].get("attention"):
            continue
        dims, rows = ALL_DIMS[cell["model"]], cell["num_rows"]
        new = {
            "num_qo_heads": dims.heads, "num_kv_heads": dims.kv_heads, "head_dim": dims.head_dim, "rows": rows,
            "tile": cell["tiles"]["attention"], "us": None, "measured_rows": rows, "us_by_context": None,
        }  # fmt: skip
        merged[_heads_and_rows(new)] = new
    models = list(dict.fromkeys(map(_heads, merged.values())))
    return sorted(merged.values(), key=lambda entry: (models.index(_heads(entry)), entry["rows"]))


def _heads(entry: Mapping[str, Any]) -> tuple[int, int, int]:
    return entry["num_qo_heads"], entry["num_kv_heads"], entry["head_dim"]


def _heads_and_rows(entry: Mapping[str, Any]) -> tuple[int, ...]:
    return *_heads(entry), entry["rows"]


def _entries(model: str, cells: Mapping[tuple[str, int], list[Any]]) -> Iterator[dict[str, Any]]:
    dims = ALL_DIMS[model]
    measured = sorted(rows for name, rows in cells if name == model)
    for rows in ROW_BUCKETS:
        source = next((some for some in measured if some >= rows), measured[-1])
        tile, us = best_tile(cells[model, source])
        if source > rows:
            # As many programs as there: a small batch is cut into more spans.
            tile = replace(tile, splits=max(tile.splits, min(_MAX_SPLITS, tile.splits * source // rows)))
        yield {
            "num_qo_heads": dims.heads, "num_kv_heads": dims.kv_heads, "head_dim": dims.head_dim, "rows": rows,
            "tile": _given(tile), "us": us[CONTEXT] if source == rows else None, "measured_rows": source,
            "us_by_context": us if source == rows else None,
        }  # fmt: skip


def best_tile(cells: list[Mapping[str, Any]]) -> tuple[AttentionTile, dict[int, float]]:
    """The tile for one number of rows from its cells, a context each, and its microseconds by context."""
    times = {cell["context_len"]: cell["attention_us"] for cell in cells}
    names = [name for name in cells[0]["tiles"] if all(name in by_name for by_name in times.values())]
    best = {context: min(by_name[name] for name in names) for context, by_name in times.items()}

    def regret(name: str) -> float:
        return sum(
            (2 if context == CONTEXT else 1) * math.log(by_name[name] / best[context])
            for context, by_name in times.items()
        )

    chosen = min(names, key=regret)
    us = {context: round(times[context][chosen], 2) for context in sorted(times)}
    return AttentionTile(**cells[0]["tiles"][chosen]), us


def _given(tile: AttentionTile) -> dict[str, int]:
    return {name: value for name, value in asdict(tile).items() if value or name == "splits"}
