"""How a batch is brought to captured sizes: plans, measured costs and the strategies that choose.

Reason words in `StepPlan.reason` and `StepOutcome.reason`:

| word | meaning |
|---|---|
| (empty) | the strategy applied as named |
| `no_costs` | `cheapest` or `split` had no measured costs and did as `nearest` |
| `cheaper_size`, `cheaper_split`, `cheaper_eager` | the measured costs spoke for it |
| `noisy_costs` | they did, but by no more than their noise: as `nearest` |
| `above_max` | the batch is above the largest capture size; `above_max` decided |
| `not_captured` | no usable graph within range; `on_miss` decided |
| `plan_layout` | the attention plan differed in layout from the captured one; `on_miss` decided |
| `idle` | no request: the smallest graph |
| `forced` | the caller gave the plan |
| `prefill`, `no_graphs` | steps that never use graphs: prompts, and a runner of kind eager |
"""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Mode = Literal["graph", "split", "eager", "compiled"]
StrategyName = Literal["nearest", "exact", "max", "cheapest", "split"]

#: Columns of `sizes.csv` from which costs are read.
COST_COLUMNS = ("batch_size", "padded_batch_size", "mode", "graph_backend", "context_len", "step_ms_p50")


@dataclass(frozen=True)
class StepPlan:
    """A way to run one decode step.

    `sizes` are the padded sizes of the parts, in order: `("graph", (8,))` replays the graph of
    size 8, `("split", (4, 2))` the graphs of 4 and then 2, `("eager", ())` runs the batch as it is,
    and `("eager", (8,))` runs it eagerly *padded to 8*, which is what a replay must equal.
    """

    mode: Mode
    sizes: tuple[int, ...] = ()
    #: Why this way was taken, in one word; empty when the strategy simply applied.
    reason: str = ""

    @property
    def num_graphs(self) -> int:
        return len(self.sizes) if self.mode in ("graph", "split") else 0

    def padded_batch_size(self, batch_size: int) -> int:
        """Rows that the model computes, padding included (the sum over a split's parts)."""
        return sum(self.sizes) or batch_size


@dataclass(frozen=True)
class StepCosts:
    """Measured step times in ms, end to end. Sizes without a measurement are absent, never 0."""

    #: Captured size → median time of a step that replays its graph (Inductor's, in mode `compiled`).
    graph_ms: dict[int, float] = field(default_factory=dict)
    #: Batch size → median time of an eager step.
    eager_ms: dict[int, float] = field(default_factory=dict)
    #: Backend of the graphs that were measured; None when unknown (injected costs).
    graph_backend: str | None = None
    #: Interquartile range, in ms, of the times above whose measurement did not settle; others are absent.
    graph_noise_ms: dict[int, float] = field(default_factory=dict)
    eager_noise_ms: dict[int, float] = field(default_factory=dict)

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]]) -> StepCosts:
        """Read the rows of a size sweep (columns of `sizes.csv`).

        Uses `step_ms_p50` of one context length, the first in the rows, so that like is compared
        with like. Rows without a measurement are skipped. `rel_iqr` of rows with an `unmet_condition`
        is noise, where there are those columns.
        """
        graph_ms: dict[int, float] = {}
        eager_ms: dict[int, float] = {}
        graph_noise_ms: dict[int, float] = {}
        eager_noise_ms: dict[int, float] = {}
        backends: set[str] = set()
        context = None
        for row in rows:
            if row["step_ms_p50"] in (None, "") or row["step_ms_p50"] != row["step_ms_p50"]:
                continue
            context = row["context_len"] if context is None else context
            if row["context_len"] != context:
                continue
            size, padded = int(row["batch_size"]), int(row["padded_batch_size"])
            if row["mode"] in ("graph", "compiled") and size == padded:
                graph_ms[padded] = float(row["step_ms_p50"])
                graph_noise_ms |= _noise_ms(row, padded)
                backends.add(str(row["graph_backend"]))
            elif row["mode"] == "eager" and size == padded:
                eager_ms[size] = float(row["step_ms_p50"])
                eager_noise_ms |= _noise_ms(row, size)
        backend = backends.pop() if len(backends) == 1 else None
        return cls(graph_ms, eager_ms, backend, graph_noise_ms, eager_noise_ms)

    @classmethod
    def from_sizes_csv(cls, path: str | Path) -> StepCosts:
        """Read the `sizes.csv` of a run, or what `save` wrote. Raises ValueError if a column lacks."""
        with Path(path).open(newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COST_COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise ValueError(
                    f"padding.costs_path={path} lacks the columns {missing}: give a run's sizes.csv."
                )
            return cls.from_rows(reader)

    def save(self, path: str | Path) -> None:
        """Write the costs as the columns of `sizes.csv` that `from_sizes_csv` reads."""
        backend = self.graph_backend or ""
        kinds = (
            ("graph", backend, self.graph_ms, self.graph_noise_ms),
            ("eager", "none", self.eager_ms, self.eager_noise_ms),
        )
        with Path(path).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow((*COST_COLUMNS, "rel_iqr", "unmet_condition"))
            for mode, graph_backend, times_ms, noise_ms in kinds:
                for size, ms in sorted(times_ms.items()):
                    noise = (noise_ms[size] / ms, "did not settle") if size in noise_ms else ("", "")
                    writer.writerow((size, size, mode, graph_backend, 0, ms, *noise))


def _noise_ms(row: Mapping[str, Any], size: int) -> dict[int, float]:
    """Return `{size: interquartile range in ms}` of a row that did not settle, else nothing."""
    if not row.get("unmet_condition") or row.get("rel_iqr") in (None, ""):
        return {}
    return {size: float(row["rel_iqr"]) * float(row["step_ms_p50"])}


@dataclass(frozen=True)
class StepOutcome:
    """How the last decode step really ran."""

    mode: Mode
    reason: str
    batch_size: int
    padded_batch_size: int
    num_graphs: int
    #: CPU time from the call to the launch, in µs; in a split, the sum over its parts.
    host_prepare_us: float
    #: Padded sizes of the parts that ran, in order; empty for an unpadded eager step.
    sizes: tuple[int, ...] = ()


class PaddingStrategy(ABC):
    """Chooses how a batch within the captured range runs.

    Args:
        sizes: the captured sizes, sorted.
        costs: measured step times, for the strategies that need them.
    """

    def __init__(self, sizes: Sequence[int], costs: StepCosts | None = None) -> None:
        self.sizes = tuple(sizes)
        self.costs = costs or StepCosts()

    @abstractmethod
    def plan(self, batch_size: int) -> StepPlan | None:
        """Return the plan for a batch, or None if no captured size is usable (a miss)."""

    def nearest(self, batch_size: int) -> int | None:
        """Return the smallest captured size ≥ `batch_size`, or None above the largest."""
        index = bisect_left(self.sizes, batch_size)
        return self.sizes[index] if index < len(self.sizes) else None

    def _nearest_plan(self, batch_size: int, reason: str = "") -> StepPlan | None:
        size = self.nearest(batch_size)
        return None if size is None else StepPlan("graph", (size,), reason)

    def _unless_noisy(self, plan: StepPlan, batch_size: int, nearest: int) -> StepPlan:
        """Return `plan`, or the nearest graph if the gain over it is no more than the noise of both."""
        costs = self.costs
        if plan.sizes == (nearest,) or nearest not in costs.graph_ms:
            return plan
        if plan.mode == "eager":
            plan_ms, noise_ms = costs.eager_ms[batch_size], costs.eager_noise_ms.get(batch_size, 0.0)
        else:
            plan_ms = sum(costs.graph_ms[size] for size in plan.sizes)
            noise_ms = sum(costs.graph_noise_ms.get(size, 0.0) for size in plan.sizes)
        noise_ms += costs.graph_noise_ms.get(nearest, 0.0)
        is_noise = noise_ms > 0 and costs.graph_ms[nearest] - plan_ms <= noise_ms
        return StepPlan("graph", (nearest,), "noisy_costs") if is_noise else plan


class Nearest(PaddingStrategy):
    """The smallest captured size ≥ the batch: what the engines do."""

    def plan(self, batch_size: int) -> StepPlan | None:
        return self._nearest_plan(batch_size)


class Exact(PaddingStrategy):
    """Replay only on a captured size."""

    def plan(self, batch_size: int) -> StepPlan | None:
        return StepPlan("graph", (batch_size,)) if batch_size in self.sizes else None


class Max(PaddingStrategy):
    """Always the largest graph."""

    def plan(self, batch_size: int) -> StepPlan | None:
        return StepPlan("graph", (self.sizes[-1],)) if batch_size <= self.sizes[-1] else None


class Cheapest(PaddingStrategy):
    """The captured size ≥ the batch, or eager, with the lowest measured step time.

    Latency is not monotone in the size, so a larger graph may be the faster one. On ties a graph
    beats eager, and less padding more.
    """

    def plan(self, batch_size: int) -> StepPlan | None:
        nearest = self.nearest(batch_size)
        if nearest is None:
            return None
        measured = [s for s in self.sizes if s >= batch_size and s in self.costs.graph_ms]
        if not measured:
            return self._nearest_plan(batch_size, "no_costs")
        best = min(measured, key=lambda size: (self.costs.graph_ms[size], size))
        if self.costs.eager_ms.get(batch_size, float("inf")) < self.costs.graph_ms[best]:
            return self._unless_noisy(StepPlan("eager", (), "cheaper_eager"), batch_size, nearest)
        plan = StepPlan("graph", (best,), "" if best == nearest else "cheaper_size")
        return self._unless_noisy(plan, batch_size, nearest)


class Split(PaddingStrategy):
    """Several graphs in a row where the sum of their measured step times is lower than one graph's."""

    def plan(self, batch_size: int) -> StepPlan | None:
        nearest = self.nearest(batch_size)
        if nearest is None:
            return None
        sizes = split_sizes(batch_size, self.sizes, self.costs)
        if sizes is None:
            return self._nearest_plan(batch_size, "no_costs")
        if len(sizes) > 1:
            plan = StepPlan("split", sizes, "cheaper_split")
        else:
            plan = StepPlan("graph", sizes, "" if sizes == (nearest,) else "cheaper_size")
        return self._unless_noisy(plan, batch_size, nearest)


STRATEGIES: dict[str, type[PaddingStrategy]] = {
    "nearest": Nearest,
    "exact": Exact,
    "max": Max,
    "cheapest": Cheapest,
    "split": Split,
}


def create_strategy(name: str, sizes: Sequence[int], costs: StepCosts | None = None) -> PaddingStrategy:
    """Return the strategy `name` over the captured `sizes`. Raises ValueError for an unknown name."""
    if name not in STRATEGIES:
        raise ValueError(f"padding.strategy={name} is unknown: choose from {', '.join(STRATEGIES)}.")
    return STRATEGIES[name](sorted(sizes), costs)


def split_sizes(batch_size: int, sizes: Sequence[int], costs: StepCosts) -> tuple[int, ...] | None:
    """Return the parts, largest first, that cover `batch_size` at the lowest sum of measured times.

    Dynamic programming over the rows left: `best(n) = min over s of cost(s) + best(n - s)`. On ties
    fewer graphs, then fewer padding rows. None if no captured size has a cost.
    """
    priced = [size for size in sizes if size in costs.graph_ms]
    if not priced:
        return None
    # Whole nanoseconds, so that equal sums are ties whatever the order of the additions.
    cost_ns = {size: round(costs.graph_ms[size] * 1e6) for size in priced}
    # Per number of rows left: (time, graphs, rows computed, last part taken).
    best = [(0, 0, 0, 0)]
    for rows in range(1, batch_size + 1):
        rest = [(best[max(rows - size, 0)], size) for size in priced]
        best.append(min((ns + cost_ns[s], graphs + 1, padded + s, s) for (ns, graphs, padded, _), s in rest))
    taken = [size for *_, size in best]
    return _parts(taken, batch_size)


def greedy_sizes(batch_size: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return parts that cover `batch_size` without costs: the largest size, then the nearest."""
    full, rest = divmod(batch_size, sizes[-1])
    parts = (sizes[-1],) * full
    return parts if rest == 0 else (*parts, sizes[bisect_left(sizes, rest)])


def _parts(taken: Sequence[int], batch_size: int) -> tuple[int, ...]:
    parts, rows = [], batch_size
    while rows > 0:
        parts.append(taken[rows])
        rows -= taken[rows]
    return tuple(sorted(parts, reverse=True))
