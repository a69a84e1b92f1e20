"""Writes what `--only attention` measured into a device's table: `bench_fused.py IN.json --write-table TABLE`.

A captured graph keeps its tile for requests of every length, and nobody knows at capture how long they will
be. So there is one tile for a number of rows: the one whose time, over the best of each context measured,
has the smallest geometric mean. The context of the published results counts twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fused_bench.rig import ALL_DIMS, CONTEXT
from runners.attention.triton_backend import AttentionTile
from runners.models.fused.gemm_choice import ROW_BUCKETS

_MAX_SPLITS = 16
_START = ' "attention": [\n'


def write_table(measured: Path, path: Path) -> None:
    """Replace the attention of the models in the bench's file `measured` in the table at `path`."""
    cells: dict[tuple[str, int], list[Any]] = {}
    for cell in json.loads(measured.read_text())["attention_cells"].values():
        cells.setdefault((cell["model"], cell["batch_size"]), []).append(cell)
    new = [entry for name in dict.fromkeys(name for name, _ in cells) for entry in _entries(name, cells)]
    text = path.read_text()
    kept = [entry for entry in json.loads(text)["attention"] if _heads(entry) not in set(map(_heads, new))]
    # An entry a line, and what stands before them as it was.
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in kept + new)
    path.write_text(f"{text[: text.index(_START)]}{_START}{lines}\n ]\n}}\n")


def _heads(entry: Mapping[str, Any]) -> tuple[int, int, int]:
    return entry["num_qo_heads"], entry["num_kv_heads"], entry["head_dim"]


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
