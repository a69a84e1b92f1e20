"""Virtual clocks: what a step of the workload replay is worth in time.

Between requests a clock jumps, so that an hour of trace takes as long as its steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from harness.scheduler import ScheduledStep
    from harness.scheduler_loop import StepResult


class Clock(Protocol):
    """The time of a replay, in ms from its start."""

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

    def __init__(self, cost_ms: Callable[[ScheduledStep, StepResult], float]) -> None:
        self._cost_ms = cost_ms
        self._now_ms = 0.0

    @property
    def now_ms(self) -> float:
        return self._now_ms

    def advance(self, step: ScheduledStep, result: StepResult, measured_ms: float) -> float:
        self._now_ms += self._cost_ms(step, result)
        return self._now_ms

    def jump_to(self, time_ms: float) -> None:
        self._now_ms = max(self._now_ms, time_ms)


class FixedClock(CostClock):
    """Advances by the same `step_ms` for each step."""

    def __init__(self, step_ms: float) -> None:
        super().__init__(lambda step, result: step_ms)


class MeasuredClock(CostClock):
    """Advances by the time that each step really took: a slower step enlarges the next batch."""

    def __init__(self) -> None:
        super().__init__(lambda step, result: 0.0)

    def advance(self, step: ScheduledStep, result: StepResult, measured_ms: float) -> float:
        self._now_ms += measured_ms
        return self._now_ms
