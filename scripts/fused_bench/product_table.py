"""The products of a device's table, from what `--only products` and `--only steps` measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fused_bench.compile_ahead import shape_product
from fused_bench.rig import ALL_DIMS, Dims
from runners.models.fused.candidates import candidates
from runners.models.fused.recipe import VENDORS, Recipe
from runners.models.fused.tuning import recipe_of

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
    return _in_order(merged)


def with_steps(entries: Sequence[Entry], cells: Mapping[str, Mapping[str, Any]]) -> list[Entry]:
    """The entries with the winners of `--only steps`, where the whole step is faster by them and its bits the same.

    Every product that such a cell searched is measured at its rows from then on, also one that was left as it was. An entry
    that was assumed from that number of rows changes with it, unless it has a cell of its own. ValueError for a
    winner that no kernel describes any more.
    """
    merged = {_key(entry): entry for entry in entries}
    with_cell = {
        (*shape, cell["num_rows"])
        for cell in cells.values()
        for shape in ALL_DIMS[cell["model"]].shapes().values()
    }
    for cell in filter(is_better, cells.values()):
        for new in _of_cell(cell):
            rows, name = new["measured_rows"], new["product"]
            merged[_key(new)] = _put(merged.get(_key(new)), new)
            if cell["before"][name] == cell["after"][name]:
                continue
            for key, entry in merged.items():
                is_assumed = entry["measured_rows"] == rows and key[:3] == _key(new)[:3]
                if is_assumed and (*key[1:3], entry["rows"]) not in with_cell:
                    merged[key] = _put(entry, new | {"rows": entry["rows"]})
    return _in_order(merged.values())


def is_better(cell: Mapping[str, Any]) -> bool:
    """Whether the step is faster by the winners, beyond the noise, and its bits are the same."""
    return bool(cell["same_bits"]) and cell["after_again_ms"] < 0.998 * cell["before_again_ms"]


def _of_cell(cell: Mapping[str, Any]) -> Iterator[Entry]:
    rows = cell["num_rows"]
    for name, (n, k) in ALL_DIMS[cell["model"]].shapes().items():
        if name not in cell["ms_by_part"]:
            continue
        tile = cell["tiles"][name]
        entry = {"product": name, "n": n, "k": k, "rows": rows, "dtype": "bfloat16", "tile": tile}
        try:
            recipe_of(entry)
        except TypeError as error:
            raise ValueError(
                f"{cell['model']} {rows} rows: the winner of {name}, {tile}, is no tile of this version"
                f" ({error}): measure these rows again"
            ) from error
        yield entry | {"us": None, "measured_rows": rows}


def _put(old: Entry | None, new: Entry) -> Entry:
    """`new`, or `old` where it says the same: it may know the microseconds."""
    if old is None or recipe_of(old) != recipe_of(new):
        return new
    is_same = old["measured_rows"] == new["measured_rows"]
    return old | {"us": old["us"] if is_same else None, "measured_rows": new["measured_rows"]}


def _in_order(entries: Iterable[Entry]) -> list[Entry]:
    entries = list(entries)
    shapes = list(dict.fromkeys((entry["n"], entry["k"]) for entry in entries))
    return sorted(entries, key=lambda entry: (shapes.index((entry["n"], entry["k"])), entry["rows"]))


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
        str(recipe): recipe for recipe in (*VENDORS, *candidates(product, record["num_rows"]))
    }
    tile = by_name[record["recipe"]].tile
    return None if tile is None else asdict(tile)
