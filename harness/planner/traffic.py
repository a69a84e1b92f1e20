"""Where batches come from: a simulated trace, whose batches answer to the list, or an engine's log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from harness.planner.simulate import simulate
from harness.planner.step_times import Runner, StepTimes, step_times

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.planner.contexts import ContextGrid
    from harness.planner.cost import CostTable
    from harness.planner.simulation import Simulation
    from harness.scheduler import SchedulerLimits
    from harness.workload.base import Workload


@dataclass(frozen=True)
class ListTraffic:
    """The decode batches of one capture list, by window of the time of the arrivals."""

    times: StepTimes
    #: `[num_windows, max_batch_size + 1, num_cells]`
    histogram: NDArray[np.int64]
    simulation: Simulation | None

    @property
    def excess_tokens(self) -> NDArray[np.int64] | None:
        """As `Simulation.excess_tokens`; None where only sums of tokens are known."""
        return self.simulation.excess_tokens if self.simulation else None

    @property
    def window_ns(self) -> NDArray[np.int64]:
        """`[num_windows, max_batch_size + 1]` time of the steps in ns."""
        if self.simulation:
            return self.simulation.window_ns
        total: NDArray[np.int64] = np.einsum("wbc,bc->wb", self.histogram, self.times.decode_ns)
        return total


class Traffic(Protocol):
    """Batches under any capture list."""

    grid: ContextGrid
    #: Whether the batches depend on the list.
    has_feedback: bool

    @property
    def num_windows(self) -> int: ...

    @property
    def max_batch_size(self) -> int: ...

    def under(self, sizes: Sequence[int]) -> ListTraffic:
        """Return the batches that run when `sizes` are captured."""
        ...


@dataclass
class SimulatedTraffic:
    """A trace served on the cost table. Each list is simulated once."""

    costs: CostTable
    #: The whole trace, or its parts: these last for one list.
    workload: Workload | Iterable[Workload]
    #: What the scheduler may use under a list: graphs may take pages away.
    limits_for: Callable[[Sequence[int]], SchedulerLimits]
    grid: ContextGrid
    num_windows: int
    max_batch_size: int
    runner: Runner = field(default_factory=Runner)
    slo_ms: Mapping[str, float] = field(default_factory=dict)
    has_feedback: bool = True

    def __post_init__(self) -> None:
        self._known: dict[tuple[int, ...], ListTraffic] = {}

    def under(self, sizes: Sequence[int]) -> ListTraffic:
        key = tuple(sorted(sizes))
        if key not in self._known:
            limits = self.limits_for(key)
            times = step_times(
                self.costs, key, limits.max_batch_size, limits.prefill_chunk_tokens, self.grid, self.runner
            )
            simulation = simulate(
                times, limits, self.workload, num_windows=self.num_windows, slo_ms=self.slo_ms
            )
            self._known[key] = ListTraffic(times, simulation.histogram, simulation)
        return self._known[key]


@dataclass
class LoggedTraffic:
    """Batches that an engine logged: they are what they were, whatever list is considered."""

    costs: CostTable
    #: `[num_windows, max_batch_size + 1, num_cells]`
    histogram: NDArray[np.int64]
    grid: ContextGrid
    runner: Runner = field(default_factory=Runner)
    has_feedback: bool = False

    def __post_init__(self) -> None:
        self._known: dict[tuple[int, ...], ListTraffic] = {}

    @property
    def num_windows(self) -> int:
        return len(self.histogram)

    @property
    def max_batch_size(self) -> int:
        return int(self.histogram.shape[1]) - 1

    def under(self, sizes: Sequence[int]) -> ListTraffic:
        key = tuple(sorted(sizes))
        if key not in self._known:
            times = step_times(self.costs, key, self.max_batch_size, 0, self.grid, self.runner)
            self._known[key] = ListTraffic(times, self.histogram, None)
        return self._known[key]
