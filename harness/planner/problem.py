"""The choice of a capture list as a path: from nothing, over captured sizes, to the largest batch.

Between two neighbours of a list lie the batches that run on the upper one. What a list costs is
therefore a sum over its pairs of neighbours, and the best list is a shortest path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from harness.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.planner.cost import CostTable
    from harness.planner.histogram import BatchHistogram


@dataclass(frozen=True)
class CaptureProblem:
    """Candidate sizes, and what each step of a path costs."""

    #: `[n]` candidates, increasing; the last one must be captured.
    sizes: tuple[int, ...]
    #: `[n, n + 1]`: entry `[j, i]` is the time in ms of all batches above candidate `i - 1` (all batches for
    #: `i = 0`) up to candidate `j`, run on `j`. Infinite where `i - 1` and `j` cannot be neighbours.
    arc_ms: NDArray[np.float64]
    #: `[n]` what capturing a candidate takes of each limited resource.
    device_bytes: NDArray[np.float64]
    seconds: NDArray[np.float64]
    #: Weight of all batches, to turn a sum into a mean.
    total_weight: float
    #: `[n]` False for sizes that are priced for comparison only.
    choosable: NDArray[np.bool_]

    @property
    def open_arcs_ms(self) -> NDArray[np.float64]:
        """`arc_ms`, infinite to and from sizes that cannot be chosen."""
        arcs_ms = self.arc_ms.copy()
        arcs_ms[~self.choosable] = np.inf
        arcs_ms[:, 1:][:, ~self.choosable] = np.inf
        return arcs_ms

    def list_ms(self, sizes: Sequence[int]) -> float:
        """Mean step time of the list `sizes`, whose entries are priced and end at the largest."""
        indices = [self.sizes.index(size) for size in sorted(sizes)]
        total, previous = 0.0, 0
        for index in indices:
            total += float(self.arc_ms[index, previous])
            previous = index + 1
        return total / self.total_weight


def mix(problems: Sequence[CaptureProblem], weights: Sequence[float]) -> CaptureProblem:
    """Return the problem of the weighted sum of the problems' histograms; their candidates are the same."""
    parts = [(problem, weight) for problem, weight in zip(problems, weights, strict=True) if weight]
    first = problems[0]
    return CaptureProblem(
        first.sizes,
        np.sum([weight * problem.arc_ms for problem, weight in parts], axis=0),
        first.device_bytes,
        first.seconds,
        sum(weight * problem.total_weight for problem, weight in parts),
        first.choosable,
    )


def capture_problem(
    costs: CostTable,
    histogram: BatchHistogram,
    candidates: Sequence[int],
    padding: str = "nearest",
    compared: Sequence[int] = (),
) -> CaptureProblem:
    """Price every pair of neighbours for a batch histogram.

    With `nearest` a batch runs on the smallest captured size that holds it. With `cheapest` the runner
    takes, of the captured sizes that hold it and eager, the one with the lowest *reference* time; a size
    whose reference is above a larger captured one's is never taken, so lists are considered in which
    references do not fall, and on these `cheapest` is `nearest` with eager as an alternative.
    The sizes of `compared` are priced too, but not chosen. Raises ConfigError if a batch is above the
    largest candidate, or for another strategy.
    """
    sizes = tuple(sorted({*candidates, *(size for size in compared if size < max(candidates))}))
    if histogram.max_batch_size > sizes[-1]:
        raise ConfigError(
            "--max-batch-size",
            sizes[-1],
            f"the histogram has batches of {histogram.max_batch_size}: raise it to the engine's maximum",
        )
    if padding not in ("nearest", "cheapest"):
        raise ConfigError("--padding", padding, "a plan is made for nearest or cheapest")
    upto_ms = np.stack([_upto_ms(costs, histogram, size, sizes[-1], padding) for size in sizes])
    bounds = np.array([0, *sizes])
    # [j, i]: the sum over batches up to size j, less the sum up to the neighbour below.
    arc_ms = upto_ms[np.arange(len(sizes)), list(sizes)][:, None] - upto_ms[:, bounds]
    arc_ms[~_neighbours(costs, sizes, padding)] = np.inf
    captures = costs.captures
    choosable = np.isin(sizes, list(candidates))
    return CaptureProblem(
        sizes, arc_ms, captures.device_bytes(sizes), captures.seconds(sizes), histogram.total, choosable
    )


def _upto_ms(
    costs: CostTable, histogram: BatchHistogram, size: int, max_size: int, padding: str
) -> NDArray[np.float64]:
    """`[max_size + 1]` time of all batches up to each size, run on the graph of `size`."""
    fits = histogram.batch_size <= size
    batch_size, tokens = histogram.batch_size[fits], histogram.num_kv_tokens[fits]
    step_ms = costs.graph_ms(size, tokens, batch_size)
    if histogram.excess is not None:
        step_ms += costs.graph_excess.longest_ms(size) * histogram.excess[fits]
    if padding == "cheapest":
        excess = None if histogram.excess is None else histogram.excess[fits]
        _take_cheaper_eager(costs, size, batch_size, tokens, excess, step_ms)
    by_batch = np.bincount(batch_size, step_ms * histogram.weight[fits], minlength=max_size + 1)
    return np.cumsum(by_batch, dtype=np.float64)


def _take_cheaper_eager(
    costs: CostTable,
    size: int,
    batch_size: NDArray[np.int64],
    tokens: NDArray[np.float64],
    excess: NDArray[np.float64] | None,
    step_ms: NDArray[np.float64],
) -> None:
    reference_ms = costs.step_costs.graph_ms[size]
    for batch, eager_ms in costs.step_costs.eager_ms.items():
        if eager_ms < reference_ms:
            here = batch_size == batch
            step_ms[here] = costs.eager_ms(batch, tokens[here])
            if excess is not None:
                step_ms[here] += costs.eager_excess.longest_ms(batch) * excess[here]


def _neighbours(costs: CostTable, sizes: tuple[int, ...], padding: str) -> NDArray[np.bool_]:
    """`[n, n + 1]` whether the size of column `i - 1` may come right before the one of row `j`."""
    index = np.arange(len(sizes))
    allowed = np.arange(len(sizes) + 1)[None, :] <= index[:, None]
    if padding == "cheapest":
        unmeasured = [size for size in sizes if size not in costs.step_costs.graph_ms]
        if unmeasured:
            raise ConfigError(
                "--padding",
                "cheapest",
                f"decides by measured times, and {unmeasured} have none: measure a run that captures them",
            )
        reference = np.array([costs.step_costs.graph_ms[size] for size in sizes])
        allowed[:, 1:] &= reference[None, :] <= reference[:, None]
    return allowed
