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
    #: `[max_batch_size + 1, num_cells]` ns of a decode step, host time between steps included, at least 1.
    decode_ns: NDArray[np.int64]
    #: `[prefill_chunk_tokens + 1]` ns of a prefill step by its tokens.
    prefill_ns: NDArray[np.int64]
    grid: ContextGrid

    @property
    def max_batch_size(self) -> int:
        return len(self.decode_ns) - 1

    def decode_ms(self, batch_size: int, num_kv_tokens: int) -> float:
        """The time of a decode step of `batch_size` requests that attends to `num_kv_tokens` tokens."""
        return float(self.decode_ns[batch_size, self.grid.cell(num_kv_tokens, batch_size)]) / _NS

    def prefill_ms(self, num_tokens: int) -> float:
        return float(self.prefill_ns[num_tokens]) / _NS


def step_times(
    costs: CostTable,
    sizes: Sequence[int],
    max_batch_size: int,
    prefill_chunk_tokens: int,
    grid: ContextGrid,
    runner: Runner | None = None,
) -> StepTimes:
    """Return the times of every batch up to `max_batch_size` with graphs of `sizes`.

    With `prefill_chunk_tokens=0` there is no prefill, and none need have been measured. Batches are planned by the runner's own policy. Raises CostError where a batch would run in a way
    that was not measured.
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
    plans = (policy.plan(0), *(policy.plan(batch_size) for batch_size in range(1, max_batch_size + 1)))
    decode_ms = np.ones((max_batch_size + 1, grid.num_cells))
    for batch_size in range(1, max_batch_size + 1):
        decode_ms[batch_size] = _step_ms(costs, plans[batch_size], batch_size, batch_size * grid.middles)
        decode_ms[batch_size] += costs.host_ms(batch_size)
    prefill_ms = np.zeros(1)
    if prefill_chunk_tokens:
        prefill_ms = costs.prefill_ms(np.arange(prefill_chunk_tokens + 1)) + costs.host_ms(1)
    return StepTimes(tuple(sorted(sizes)), plans, _whole_ns(decode_ms), _whole_ns(prefill_ms), grid)


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
        total += costs.graph_ms(size, num_kv_tokens * (rows / batch_size))
        rows_left -= rows
    return total


def _whole_ns(milliseconds: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.maximum(np.rint(milliseconds * _NS), 1).astype(np.int64)
