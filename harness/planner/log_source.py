"""An engine's log as traffic, and, where it has times, as a cost table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from harness.planner.capture_cost import CaptureCosts
from harness.planner.contexts import ContextGrid
from harness.planner.cost import CostSource, CostTable
from harness.planner.host_time import HostTime
from harness.planner.surface import SizePoints, StepSurface
from runners.padding import StepCosts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.workload.logged_batches import LoggedBatches

#: Sizes that were seen less often than this give no time: they may be warm-up or profiling.
_MIN_SAMPLES = 5


def log_histogram(
    logged: LoggedBatches, max_batch_size: int, grid: ContextGrid, num_windows: int, context: float
) -> tuple[NDArray[np.int64], int]:
    """Return `[num_windows, max_batch_size + 1, num_cells]` steps, and the number above the largest batch.

    Steps whose KV tokens the log does not have are taken at `context` tokens a request.
    """
    histogram = np.zeros((num_windows, max_batch_size + 1, grid.num_cells), dtype=np.int64)
    num_above = 0
    for window, counts in enumerate(logged.windows(num_windows)):
        for batch_size, num_steps in counts.num_steps.items():
            if batch_size > max_batch_size:
                num_above += num_steps
                continue
            tokens = counts.context(batch_size) or context
            histogram[window, batch_size, grid.cell(int(tokens * batch_size), batch_size)] += num_steps
    return histogram, num_above


def log_costs(logged: LoggedBatches, path: str, format_name: str, context: float) -> CostTable | None:
    """Return a cost table of the median step times in a log; None if it has none.

    The times hold for the traffic that was logged: they do not tell KV tokens apart, and say nothing of
    memory or capture time.
    """
    graph = _points(logged.times.medians("graph"), context)
    if not graph:
        return None
    eager = _points(logged.times.medians("eager"), context)
    return CostTable(
        source=CostSource(
            path=path,
            graph_backend=format_name,
            verified=False,
            warnings=(
                "times from an engine's log: medians at the logged contexts, not a size sweep; intervals lack their "
                "noise",
            ),
        ),
        graph=StepSurface(graph),
        eager=StepSurface(eager),
        prefill=None,
        host=HostTime(),
        captures=CaptureCosts.unknown(),
        step_costs=StepCosts(
            {size: float(at.step_ms[0]) for size, at in graph.items()},
            {size: float(at.step_ms[0]) for size, at in eager.items()},
        ),
    )


def _points(medians: Mapping[int, tuple[float, int]], context: float) -> dict[int, SizePoints]:
    return {
        size: SizePoints(np.array([size * context]), np.array([step_ms]), 0.0)
        for size, (step_ms, num_samples) in medians.items()
        if num_samples >= _MIN_SAMPLES
    }
