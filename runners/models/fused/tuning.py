"""Chooses how the fused layers run on this device, before the capture.

A table of measured winners is shipped for the devices it was measured on, so that a start-up costs no
measurement there. A product that no table knows is measured, a few candidates each, until the time for it
is up; at the numbers of rows that are left then, a product runs as at the next one that was measured.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from runners.attention.base import AttentionBackend
from runners.attention.fragment_attention import FragmentAttentionTile
from runners.attention.triton_backend import TritonAttentionBackend, tile_of
from runners.errors import RunnerError
from runners.models.fused.fragment_gemm import MAX_ROWS, FragmentTile
from runners.models.fused.gemm_choice import PRODUCTS, GemmChoice, bucket
from runners.models.fused.nvrtc import MISSING, is_available
from runners.models.fused.recipe import VENDOR, Library, Recipe, refusal
from runners.models.fused.skinny_gemm import Product, Tile

if TYPE_CHECKING:
    from runners.models.fused.layers import FusedDecoder

#: Rows → entry of a table.
Entries = dict[int, dict[str, Any]]

TABLES = Path(__file__).parent / "tables"
#: Candidates measured of a product that no table knows: each is a compile.
_MAX_CANDIDATES = 4
#: Seconds after which no further number of rows is measured, so that a start-up stays below 15 s.
_MEASURE_SECONDS = 6.0
#: Numbers of rows to measure first: the others lie between them.
_FIRST_ROWS = (1, 8, 32, 128, 256)
_NO_NVRTC = (
    f"products of up to {MAX_ROWS} rows run by slower kernels: {MISSING}; "
    "pip install cuda-bindings, or this project's extra gpu"
)
#: Devices from here on let a kernel start before the one in front has ended.
_DEPENDENT_LAUNCH = (9, 0)


@dataclass(frozen=True)
class Choice:
    """How one product, or attention, runs at up to `num_rows` rows, and where that comes from."""

    product: str
    num_rows: int
    recipe: str
    #: `table`, `measured`, `neighbour` (the time was up: as at `measured_rows`) or `default` (nothing was
    #: measured: the vendor's GEMM, or the rule of thumb).
    source: str
    #: Of the product, and of the one that reads its output if that was timed with it. None: not measured.
    measured_us: float | None = None
    #: Rows of the measurement: not always `num_rows`.
    measured_rows: int | None = None
    #: Why the table's recipe is not the one, if the table has one that cannot run here.
    refused: str | None = None


@dataclass
class Tuning:
    """What was chosen, for the record."""

    device: str
    #: File name of the table, None without one.
    table: str | None
    dependent_launch: bool
    choices: list[Choice] = field(default_factory=list)
    measure_s: float = 0.0
    compile_s: float = 0.0
    #: What makes steps slower than they could be, and what to do about it.
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, with one row a choice."""
        plain = {name: value for name, value in vars(self).items() if name != "choices"}
        return plain | {"choices": [vars(choice) for choice in self.choices]}


def tune(model: FusedDecoder, backend: AttentionBackend, batch_sizes: Sequence[int]) -> Tuning:
    """Set the recipes of `model` and the tiles of `backend` for decode steps of `batch_sizes` rows.

    On a CPU the plain twins compute everything, and nothing is chosen.
    """
    device = model.cos_sin.device
    if device.type != "cuda":
        return Tuning(str(device), None, False)
    # Another backend's kernels know nothing of ours that have not ended.
    pdl = (
        isinstance(backend, TritonAttentionBackend)
        and torch.cuda.get_device_capability(device) >= _DEPENDENT_LAUNCH
    )
    name = torch.cuda.get_device_name(device)
    path = table_path(name, torch.cuda.get_device_capability(device))
    table = WinnerTable.read(path) if path.exists() else WinnerTable()
    tuning = Tuning(name, path.name if path.exists() else None, pdl)
    model.pdl = pdl
    started = time.perf_counter()
    buckets = sorted({rows for size in batch_sizes if (rows := bucket(size)) is not None})
    if buckets and buckets[0] <= MAX_ROWS and not is_available():
        tuning.warnings.append(_NO_NVRTC)
    for rows in sorted(buckets, key=lambda rows: (rows not in _FIRST_ROWS, rows)):
        is_late = time.perf_counter() - started > _MEASURE_SECONDS
        tuning.choices += _choose_products(model, table, rows, pdl, is_late)
    tuning.measure_s = time.perf_counter() - started
    if isinstance(backend, TritonAttentionBackend):
        backend.pdl = pdl
        tuning.choices += _choose_tiles(backend, table, batch_sizes, buckets)
    return tuning


def _choose_products(
    model: FusedDecoder, table: WinnerTable, rows: int, pdl: bool, is_late: bool
) -> list[Choice]:
    products = model.products()
    choices, unknown, refused = [], [], {}
    for name in PRODUCTS:
        entry = table.product(name, products[name][0], rows)
        if entry is not None:
            recipe = recipe_of(entry)
            refused[name] = refusal(recipe, products[name][0], rows)
            if refused[name] is None:
                model.choice.recipes[name, rows] = recipe
                choices.append(_from_table(name, rows, str(recipe), entry))
                continue
        unknown.append(name)
    found = _choose_unknown(model, products, unknown, rows, pdl, is_late)
    return choices + [replace(choice, refused=refused.get(choice.product)) for choice in found]


def _choose_unknown(
    model: FusedDecoder,
    products: Mapping[str, Sequence[Product]],
    unknown: Sequence[str],
    rows: int,
    pdl: bool,
    is_late: bool,
) -> list[Choice]:
    """What the products that no table serves run by: measured, unless it is late or their type is none of ours."""
    if model.embedding.element_size() != 2:
        return [Choice(name, rows, str(VENDOR), "default") for name in unknown]
    if is_late:
        return [_as_neighbour(model.choice, name, rows) for name in unknown]
    choices = []
    for record in model.choice.measure(products, rows, pdl=pdl, names=unknown, limit=_MAX_CANDIDATES):
        took = record.candidate_us.get(record.recipe)
        choices.append(Choice(record.product, rows, record.recipe, "measured", took, rows))
    return choices


def _as_neighbour(choice: GemmChoice, name: str, rows: int) -> Choice:
    """Let the product `name` run as at the next larger number of rows that was chosen for it, if any.

    A tile of few rows serves many, in turns; that of one row serves no other number, and one of the fragment
    kernel, whose registers hold all rows, no larger number.
    """
    chosen = sorted(
        other
        for (product, other), recipe in choice.recipes.items()
        if product == name and other > 1 and (other > rows or not isinstance(recipe.tile, FragmentTile))
    )
    if not chosen:
        return Choice(name, rows, str(VENDOR), "default")
    nearest = next((other for other in chosen if other > rows), chosen[-1])
    recipe = choice.recipes[name, rows] = choice.recipes[name, nearest]
    return Choice(name, rows, str(recipe), "neighbour", measured_rows=nearest)


def _choose_tiles(
    backend: TritonAttentionBackend, table: WinnerTable, batch_sizes: Sequence[int], buckets: list[int]
) -> list[Choice]:
    choices = []
    for rows in buckets:
        entry = table.attention(backend, rows)
        if entry is None:
            choices.append(Choice("attention", rows, str(backend.tile(rows)), "default"))
            continue
        tile = tile_of(entry["tile"])
        if isinstance(tile, FragmentAttentionTile):
            refused = backend.no_fragments or tile.refusal(backend.groups, backend.device)
            if refused is not None:
                kept = Choice("attention", rows, str(backend.tile(rows)), "default", refused=refused)
                choices.append(kept)
                continue
        choices.append(_from_table("attention", rows, str(tile), entry))
        backend.tiles |= {size: tile for size in range(1, max(batch_sizes) + 1) if bucket(size) == rows}
    return choices


def _from_table(name: str, rows: int, recipe: str, entry: Mapping[str, Any]) -> Choice:
    return Choice(name, rows, recipe, "table", entry["us"], entry["measured_rows"])


# --- the table ---------------------------------------------------------------------------------


def table_path(device_name: str, capability: tuple[int, int]) -> Path:
    """Where the table of a device would lie."""
    name = device_name.lower().replace(" ", "_").replace("-", "_")
    return TABLES / f"{name}_sm{capability[0]}{capability[1]}.json"


class WinnerTable:
    """Winners by product shape and rows; `provenance` says how they were found."""

    def __init__(self, content: Mapping[str, Any] | None = None) -> None:
        content = content or {"provenance": {}, "products": [], "attention": []}
        self.provenance: dict[str, Any] = dict(content["provenance"])
        self._products = _by_rows(content["products"], _PRODUCT_KEY)
        self._attention = _by_rows(content["attention"], _ATTENTION_KEY)

    @classmethod
    def read(cls, path: Path) -> WinnerTable:
        """RunnerError for a table with an entry that is none, with the file and the entry."""
        content = json.loads(path.read_text())
        for name, key, make in (
            ("products", _PRODUCT_KEY, recipe_of),
            ("attention", _ATTENTION_KEY, lambda entry: tile_of(entry["tile"])),
        ):
            for entry in content[name]:
                try:
                    _check_entry(entry, key)
                    make(entry)
                except (KeyError, TypeError, ValueError) as error:
                    raise RunnerError(
                        f"{path}: {name} has an entry that is none ({type(error).__name__}: {error}): {entry}. "
                        "Mend it, or take it out: what no table knows is measured."
                    ) from error
        return cls(content)

    def product(self, name: str, product: Product, rows: int) -> dict[str, Any] | None:
        """The entry of a product of this name, shape and type: that of the fewest rows that hold `rows`."""
        k, dtype = int(product.weight.shape[1]), str(product.weight.dtype).removeprefix("torch.")
        return _first_with(self._products.get((name, product.num_outputs, k, dtype), {}), rows)

    def attention(self, backend: TritonAttentionBackend, rows: int) -> dict[str, Any] | None:
        """The entry of the heads that all groups of `backend` share, None if they differ."""
        shapes = {(g.num_qo_heads, g.num_kv_heads, g.head_dim) for g in backend.groups}
        if len(shapes) != 1 or backend.kv.dtype.itemsize != 2:
            return None
        return self.attention_entry(*shapes.pop(), rows)

    def attention_entry(
        self, num_qo_heads: int, num_kv_heads: int, head_dim: int, rows: int
    ) -> dict[str, Any] | None:
        """The entry of these heads: that of the fewest rows that hold `rows`."""
        return _first_with(self._attention.get((num_qo_heads, num_kv_heads, head_dim), {}), rows)


def recipe_of(entry: Mapping[str, Any]) -> Recipe:
    """The recipe of a product's entry."""
    tile = entry["tile"]
    if tile is None:
        return VENDOR
    if "library" in tile:
        return Recipe(Library(**tile))
    return Recipe(FragmentTile(**tile) if "turns" in tile else Tile(**tile))


#: What tells entries of a table apart, beside their rows.
_PRODUCT_KEY = ("product", "n", "k", "dtype")
_ATTENTION_KEY = ("num_qo_heads", "num_kv_heads", "head_dim")


def _check_entry(entry: Mapping[str, Any], key: Sequence[str]) -> None:
    """KeyError for what it lacks, TypeError for a number of its tile that is none."""
    for name in (*key, "rows", "us", "measured_rows", "tile"):
        entry[name]
    for name, value in (entry["tile"] or {}).items():
        if name != "library" and not isinstance(value, int):
            raise TypeError(f"{name}={value!r} is no whole number")


def _by_rows(entries: Sequence[Mapping[str, Any]], key: Sequence[str]) -> dict[tuple[Any, ...], Entries]:
    """What an entry is of → rows → entry."""
    found: dict[tuple[Any, ...], Entries] = {}
    for entry in entries:
        found.setdefault(tuple(entry[name] for name in key), {})[entry["rows"]] = dict(entry)
    return found


def _first_with(entries: Entries, rows: int) -> dict[str, Any] | None:
    return next((entries[other] for other in sorted(entries) if other >= rows), None)
