"""Which recipe each product uses at each number of rows: measured once, then looked up.

The best way to multiply few rows by a large weight depends on the shape and the device, so it is
measured at capture time, in a CUDA graph, over the weights of several layers in turn: one weight
alone would be read from the L2 cache and flatter every candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from runners.models.fused.candidates import candidates
from runners.models.fused.fragment_gemm import FragmentTile
from runners.models.fused.launch import compile_ahead
from runners.models.fused.recipe import VENDOR, VENDORS, Recipe, refusal, run_product
from runners.models.fused.skinny_gemm import Product, Rows

#: Rows are rounded up to one of these: the choice of a bucket serves every batch size in it.
ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256)
#: The products of a model, in the order in which they are measured.
PRODUCTS = ("qkv", "gate_up", "output", "down", "head")
#: Product → the one that reads its output, for those that may leave partial sums.
_FOLLOWER = {"output": "gate_up", "down": "qkv"}

#: Bytes of weights that one timed graph reads: several times the L2 cache of an H200 (50 MiB).
_COLD_BYTES = 256 << 20


def bucket(num_rows: int) -> int | None:
    """The smallest bucket that holds `num_rows`, None above the largest."""
    return next((rows for rows in ROW_BUCKETS if rows >= num_rows), None)


@dataclass
class ChoiceRecord:
    """One measured product: what each candidate took and which one was taken."""

    product: str
    num_rows: int
    n: int
    k: int
    #: The fastest.
    recipe: str
    #: Candidate → microseconds, of the product and of the one named in `timed_with` if any.
    candidate_us: dict[str, float]
    timed_with: str | None
    #: Candidate → why it could not run.
    errors: dict[str, str] = field(default_factory=dict)


class GemmChoice:
    """The table, and its record. Without a measurement, every product uses the vendor's GEMM."""

    def __init__(self) -> None:
        self.recipes: dict[tuple[str, int], Recipe] = {}
        self.records: list[ChoiceRecord] = []

    def recipe(self, product: str, num_rows: int) -> Recipe:
        """The recipe of `product` (one of `PRODUCTS`) for `num_rows` rows."""
        rows = bucket(num_rows)
        return VENDOR if rows is None else self.recipes.get((product, rows), VENDOR)

    def measure(
        self,
        products: Mapping[str, Sequence[Product]],
        rows: int,
        *,
        pdl: bool = False,
        names: Sequence[str] = PRODUCTS,
        limit: int | None = None,
    ) -> list[ChoiceRecord]:
        """Choose the recipes of the products called `names` for `rows` rows, and return the records.

        `products` has all of them, name → one a layer. `limit` is the most candidates of our own that are
        tried of a product; None for all. They are compiled side by side before the first is timed.

        `output` and `down` leave sums of squares for the product after them, or leave them to it: they are
        timed with that one, by the recipe just chosen for it.
        """
        recipes = {name: _thin(_runnable(products[name][0], rows), limit) for name in names}
        if limit is not None:
            with compile_ahead():
                for name, some in recipes.items():
                    for recipe in some:
                        with suppress(Exception):  # It fails again where it is timed, and is a row there.
                            _turn_once(products[name][0], recipe, rows, pdl)
        ordered = [name for name in PRODUCTS if name in recipes]
        return [self._measure_one(name, products, recipes[name], rows, pdl) for name in ordered]

    def _measure_one(
        self,
        name: str,
        products: Mapping[str, Sequence[Product]],
        recipes: Sequence[Recipe],
        rows: int,
        pdl: bool,
    ) -> ChoiceRecord:
        first, follower = products[name][0], _FOLLOWER.get(name)
        record = ChoiceRecord(
            name, rows, first.num_outputs, int(first.weight.shape[1]), str(VENDOR), {}, follower
        )
        best = float("inf")
        for recipe in [*VENDORS, *recipes]:
            turn = [(products[name], recipe)]
            if follower is not None:
                turn.append((products[follower], self.recipe(follower, rows)))
            try:
                took = time_products(turn, rows, pdl=pdl)
            except Exception as error:  # A candidate that does not fit the device is a row, not a failure.
                record.errors[str(recipe)] = f"{type(error).__name__}: {error}"[:200]
                continue
            record.candidate_us[str(recipe)] = took
            if took < best:
                best, record.recipe = took, str(recipe)
                self.recipes[name, rows] = recipe
        self.records.append(record)
        return record


def _runnable(product: Product, rows: int) -> list[Recipe]:
    return [recipe for recipe in candidates(product, rows) if refusal(recipe, product, rows) is None]


def _thin(recipes: list[Recipe], limit: int | None) -> list[Recipe]:
    """The first tiles of the fragment kernel, half of `limit`, and of the others evenly spaced ones: neighbours are alike."""
    if limit is None or len(recipes) <= limit:
        return recipes
    few = [recipe for recipe in recipes if isinstance(recipe.tile, FragmentTile)][: limit // 2]
    others = [recipe for recipe in recipes if not isinstance(recipe.tile, FragmentTile)]
    left = min(limit - len(few), len(others))
    return few + [others[i * len(others) // left] for i in range(left)]


def _turn_once(product: Product, recipe: Recipe, rows: int, pdl: bool) -> None:
    start, residual = _start(product, rows)
    run_product(start, product, recipe, residual=residual, pdl=pdl)


def _start(product: Product, rows: int) -> tuple[Rows, torch.Tensor | None]:
    weight = product.weight
    x = weight.new_empty(rows, weight.shape[1]).normal_()
    squares = torch.rand(rows, 64, dtype=torch.float32, device=weight.device)
    residual = weight.new_empty(rows, weight.shape[0]).normal_() if product.residual else None
    return Rows(x, squares), residual


def time_products(turn: Sequence[tuple[Sequence[Product], Recipe]], rows: int, *, pdl: bool = False) -> float:
    """Microseconds of one turn through the products of a layer, layer after layer, in one graph.

    `turn` is one product (of every layer) and its recipe, or two: the second reads what the first
    leaves. The first starts from random rows each time.
    """
    bytes_a_turn = sum(products[0].weight.nbytes for products, _ in turn)
    count = max(4, min(64, -(-_COLD_BYTES // bytes_a_turn)))
    start, residual = _start(turn[0][0][0], rows)

    def run() -> None:
        for i in range(count):
            stream = start
            for products, recipe in turn:
                item = products[i % len(products)]
                stream = run_product(
                    stream, item, recipe, residual=residual if item.residual else None, pdl=pdl
                ).rows

    return time_in_graph(run) / count


def time_in_graph(run: Callable[[], None], num_replays: int = 7) -> float:
    """Median microseconds of a replay of `run`, captured after one warm-up call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_replays + 1)]
    graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    took: list[float] = [before.elapsed_time(after) for before, after in pairwise(events)]
    graph.reset()
    return 1000.0 * sorted(took)[len(took) // 2]
