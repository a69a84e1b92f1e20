"""Times one decode step by two clocks: the host's from the call, the device's around the graph."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.device import synchronize
from runners.stopwatch import create_stopwatch
from runners.token_reader import TokenReader

if TYPE_CHECKING:
    from runners.forward_batch import ForwardBatch
    from runners.model_runner import ModelRunner
    from runners.padding import StepPlan


@dataclass(frozen=True)
class StepTiming:
    """One step. `step_ms` runs from the call until the sampled token ids could be read."""

    host_prepare_us: float
    replay_ms: float
    step_ms: float


class StepTimer:
    """Runs decode steps on `runner` and times them; poison mode is refused in a timed step."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._stopwatch = create_stopwatch(runner.device)
        self._reader = TokenReader(runner.device, runner.config.max_batch_size)

    def isolated(self, batch: ForwardBatch, plan: StepPlan | None) -> StepTiming:
        """Time one step with nothing else queued on the device."""
        synchronize(self._runner.device)
        self._runner.stopwatch = self._stopwatch
        start_ns = time.perf_counter_ns()
        self._reader.enqueue(self._runner.forward(batch, plan=plan)).read()
        step_ms = (time.perf_counter_ns() - start_ns) / 1e6
        self._runner.stopwatch = None
        outcome = self._runner.outcome
        assert outcome is not None
        return StepTiming(outcome.host_prepare_us, self._stopwatch.elapsed_ms(), step_ms)

    def back_to_back(self, batch: ForwardBatch, plan: StepPlan | None, num_steps: int) -> float:
        """Return the time a step in ms when `num_steps` are launched in a row and read at the end.

        The device never waits for the host to read a token, so this is the pace that a perfect
        overlap of host and device would reach.
        """
        synchronize(self._runner.device)
        start_ns = time.perf_counter_ns()
        for _ in range(num_steps):
            pending = self._reader.enqueue(self._runner.forward(batch, plan=plan))
        pending.read()
        return (time.perf_counter_ns() - start_ns) / 1e6 / num_steps
