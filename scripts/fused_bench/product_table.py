"""The products of a device's table, from what `--only products` measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fused_bench.compile_ahead import shape_product
from fused_bench.rig import ALL_DIMS, Dims
from runners.models.fused.candidates import candidates
from runners.models.fused.recipe import VENDOR, Recipe

Entry = dict[str, Any]


def with_products(
    entries: Sequence[Entry], measured: Mapping[str, Iterable[Mapping[str, Any]]]
) -> list[Entry]:
    """A table's products `entries` and those of `measured` (model → its `ChoiceRecord`s, as dictionaries).

    What was assumed is replaced, not what was measured: a winner of whole steps stays.
    """
    new = [entry for model, records in measured.items() for entry in _entries(records, ALL_DIMS[model])]
    known = {_key(entry) for entry in entries if entry["measured_rows"] == entry["rows"]}
    replaced = {_key(entry) for entry in new} - known
    kept = [entry for entry in entries if _key(entry) not in replaced]
    merged = kept + [entry for entry in new if _key(entry) in replaced]
    shapes = list(dict.fromkeys((entry["n"], entry["k"]) for entry in merged))
    return sorted(merged, key=lambda entry: (shapes.index((entry["n"], entry["k"])), entry["rows"]))


def with_steps(entries: Sequence[Entry], cells: Mapping[str, Mapping[str, Any]]) -> list[Entry]:
    """The entries with the winners of `--only steps`, where the whole step is faster by them and its bits the same.

    An entry that was assumed from that number of rows changes with it.
    """
    found = {(cell["model"], cell["num_rows"]): cell for cell in cells.values() if _is_better(cell)}
    return [_as_in_steps(entry, found) for entry in entries]


def _is_better(cell: Mapping[str, Any]) -> bool:
    return bool(cell["same_bits"]) and cell["after_again_ms"] < 0.998 * cell["before_again_ms"]


def _as_in_steps(entry: Entry, cells: Mapping[tuple[str, int], Mapping[str, Any]]) -> Entry:
    name = entry["product"]
    for (model, rows), cell in cells.items():
        shape = ALL_DIMS[model].shapes()[name]
        is_changed = cell["before"][name] != cell["after"][name]
        if shape == (entry["n"], entry["k"]) and entry["measured_rows"] == rows and is_changed:
            return {**entry, "tile": cell["tiles"][name], "us": None}
    return entry


def _key(entry: Entry) -> tuple[Any, ...]:
    return tuple(entry[name] for name in ("product", "n", "k", "rows", "dtype"))


def _entries(records: Iterable[Mapping[str, Any]], dims: Dims) -> Iterator[Entry]:
    for record in records:
        took = record["candidate_us"].get(record["recipe"])
        if took is None:  # no candidate ran
            continue
        yield {
            **{"product": record["product"], "n": record["n"], "k": record["k"]},
            **{"rows": record["num_rows"], "dtype": "bfloat16", "tile": _tile(record, dims)},
            **{"us": round(took, 2), "measured_rows": record["num_rows"]},
        }


def _tile(record: Mapping[str, Any], dims: Dims) -> dict[str, Any] | None:
    product = shape_product(record["product"], record["n"], record["k"], dims.tied)
    by_name: dict[str, Recipe] = {
        str(recipe): recipe for recipe in (VENDOR, *candidates(product, record["num_rows"]))
    }
    tile = by_name[record["recipe"]].tile
    return None if tile is None else asdict(tile)
