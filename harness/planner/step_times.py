"""What each decode batch costs under one capture list: how it runs, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from runners.step_policy import StepPolicy

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.planner.contexts import ContextGrid
    from harness.planner.cost import CostTable
    from runners.padding import StepPlan

_NS = 1e6


@dataclass(frozen=True)
class Runner:
    """How a runner chooses among its captured sizes: the fields of the same names in the configuration."""

    padding: str = "nearest"
    above_max: str = "eager"
    on_miss: str = "eager"


@dataclass(frozen=True)
class StepTimes:
    """Times of one capture list, by batch size. Entry 0 of each is unused."""

    sizes: tuple[int, ...]
    plans: tuple[StepPlan, ...]
    #: `[max_batch_size + 1, num_cells]` ns of a decode step of requests of one length that follows a decode
    #: step, host time between steps included, at least 1.
    decode_ns: NDArray[np.int64]
    #: `[max_batch_size + 1]` ns (float64) added for each token that a request has less than the longest one.
    excess_ns: NDArray[np.float64]
    #: `[max_batch_size + 1]` ns added if the step follows a prefill step.
    after_prefill_ns: NDArray[np.int64]
    #: `[prefill_chunk_tokens + 1]` ns of a prefill step by its tokens.
    prefill_ns: NDArray[np.int64]
    #: `[num_points]` pairs of a new and a cached token in a prefill step, from 0, and the ns that they add.
    pairs: NDArray[np.int64]
    pairs_ns: NDArray[np.int64]
    grid: ContextGrid

    @property
    def max_batch_size(self) -> int:
        return len(self.decode_ns) - 1

    def decode_ms(
        self, batch_size: int, num_kv_tokens: int, longest: int | None = None, after_prefill: bool = False
    ) -> float:
        """The time of a decode step of `batch_size` requests that attends to `num_kv_tokens` tokens.

        `longest` is how many of them the longest request has; all have the same number, if it is not given.
        """
        step_ns = int(self.decode_ns[batch_size, self.grid.cell(num_kv_tokens, batch_size)])
        if longest is not None:
            step_ns += int(self.excess_ns[batch_size] * (longest * batch_size - num_kv_tokens))
        if after_prefill:
            step_ns += int(self.after_prefill_ns[batch_size])
        return step_ns / _NS

    def prefill_ms(self, num_tokens: int, num_pairs: int = 0) -> float:
        """The time of a prefill step whose tokens attend to `num_pairs` cached ones, each counted by itself."""
        i = int(np.searchsorted(self.pairs, num_pairs, side="right")) - 1
        step_ns = int(self.prefill_ns[num_tokens] + self.pairs_ns[i])
        if i + 1 < len(self.pairs):
            rise = int(self.pairs_ns[i + 1] - self.pairs_ns[i]) * (num_pairs - int(self.pairs[i]))
            step_ns += rise // int(self.pairs[i + 1] - self.pairs[i])
        return step_ns / _NS


def step_times(
    costs: CostTable,
    sizes: Sequence[int],
    max_batch_size: int,
    prefill_chunk_tokens: int,
    grid: ContextGrid,
    runner: Runner | None = None,
) -> StepTimes:
    """Return the times of every batch up to `max_batch_size` with graphs of `sizes`.

    With `prefill_chunk_tokens=0` there is no prefill, and none need have been measured. Batches are
    planned by the runner's own policy. Raises ConfigError where a batch would run in a way that was not
    measured.
    """
    runner = runner or Runner()
    policy = StepPolicy(
        sizes,
        padding=runner.padding,
        above_max=runner.above_max,  # type: ignore[arg-type]
        on_miss=runner.on_miss,  # type: ignore[arg-type]
        graph_backend=costs.step_costs.graph_backend or "cuda",
    )
    policy.set_costs(costs.step_costs)
    batches = range(1, max_batch_size + 1)
    plans = (policy.plan(0), *(policy.plan(batch_size) for batch_size in batches))
    decode_ms = np.ones((max_batch_size + 1, grid.num_cells))
    excess_ms, after_prefill_ms = np.zeros(max_batch_size + 1), np.zeros(max_batch_size + 1)
    for n in batches:
        decode_ms[n] = _step_ms(costs, plans[n], n, n * grid.middles) + costs.host_ms(n)
        excess_ms[n] = _excess_ms(costs, plans[n], n) / n
        after_prefill_ms[n] = max(0.0, costs.host_ms(n, after_prefill=True) - costs.host_ms(n))
    prefill_ms, pairs, pairs_ms = np.zeros(1), np.zeros(1), np.zeros(1)
    if prefill_chunk_tokens:
        prefill_ms = costs.prefill_ms(np.arange(prefill_chunk_tokens + 1))
        assert costs.prefill is not None, "prefill_ms raises without one"
        pairs, pairs_ms = costs.prefill.pairs, costs.prefill.pairs_ms
    return StepTimes(
        sizes=tuple(sorted(sizes)),
        plans=plans,
        decode_ns=np.maximum(_whole(decode_ms, _NS), 1),
        excess_ns=excess_ms * _NS,
        after_prefill_ns=_whole(after_prefill_ms, _NS),
        prefill_ns=np.maximum(_whole(prefill_ms, _NS), 1),
        pairs=_whole(pairs, 1),
        pairs_ns=_whole(pairs_ms, _NS),
        grid=grid,
    )


def _step_ms(
    costs: CostTable, plan: StepPlan, batch_size: int, num_kv_tokens: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Time of a step as planned. The parts of a split share the batch's tokens by their requests."""
    if plan.mode == "eager":
        return costs.eager_ms(batch_size, num_kv_tokens)
    total = np.zeros_like(num_kv_tokens)
    rows_left = batch_size
    for size in plan.sizes:
        rows = min(size, rows_left)
        total += costs.graph_ms(size, num_kv_tokens * (rows / batch_size), rows)
        rows_left -= rows
    return total


def _excess_ms(costs: CostTable, plan: StepPlan, batch_size: int) -> float:
    """ms a token of the longest request beyond the mean. Of the parts of a split, one has that request."""
    if plan.mode == "eager":
        return costs.eager_excess.longest_ms(batch_size)
    return costs.graph_excess.longest_ms(max(plan.sizes))


def _whole(values: NDArray[np.float64], unit: float) -> NDArray[np.int64]:
    return np.rint(values * unit).astype(np.int64)
