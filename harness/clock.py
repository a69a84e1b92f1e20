"""Virtual clocks: what a step of the workload replay is worth in time.

Between requests a clock jumps, so that an hour of trace takes as long as its steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from harness.step_times import FixedTimes

if TYPE_CHECKING:
    from harness.scheduler import ScheduledStep
    from harness.scheduler_loop import StepResult


class Clock(Protocol):
    """The time of a replay, in ms from its start."""

    #: Whether it follows the time that passes. If not, two replays of a workload are equal to the byte.
    is_measured: bool
    #: What the last step was worth.
    step_ms: float

    @property
    def now_ms(self) -> float: ...

    def advance(self, step: ScheduledStep, result: StepResult, measured_ms: float) -> float:
        """Let `step` pass and return the time after it.

        `measured_ms` is the host time since the step before: scheduling, launch and wait for the tokens,
        without recording.
        """
        ...

    def jump_to(self, time_ms: float) -> None:
        """Skip an idle gap; never goes back."""
        ...


class CostClock:
    """Advances by `cost_ms(step, result)`: the same costs give the same batches, on any machine."""

    is_measured = False

    def __init__(self, cost_ms: Callable[[ScheduledStep, StepResult], float]) -> None:
        self._cost_ms = cost_ms
        self._now_ms = 0.0
        self.step_ms = 0.0

    @property
    def now_ms(self) -> float:
        return self._now_ms

    def advance(self, step: ScheduledStep, result: StepResult, measured_ms: float) -> float:
        self.step_ms = self._cost_ms(step, result)
        self._now_ms += self.step_ms
        return self._now_ms

    def jump_to(self, time_ms: float) -> None:
        self._now_ms = max(self._now_ms, time_ms)


class FixedClock(CostClock):
    """Advances by the same `step_ms` for each step, or by `eager_step_ms` for an eager decode step."""

    def __init__(self, step_ms: float, eager_step_ms: float | None = None) -> None:
        super().__init__(FixedTimes(step_ms, eager_step_ms).cost_ms)


class MeasuredClock(CostClock):
    """Advances by the time that each step really took: a slower step enlarges the next batch."""

    is_measured = True

    def __init__(self) -> None:
        super().__init__(lambda step, result: 0.0)

    def advance(self, step: ScheduledStep, result: StepResult, measured_ms: float) -> float:
        self.step_ms = measured_ms
        self._now_ms += measured_ms
        return self._now_ms
