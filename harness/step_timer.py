"""Times one decode step by two clocks: the host's from the call, the device's around the graph."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from harness.cache_flush import CacheFlush
from harness.host_clock import Arrival, DeviceWork, Instant
from runners.batches import fed_batch
from runners.stopwatch import create_stopwatch
from runners.token_reader import PendingTokens, TokenReader

if TYPE_CHECKING:
    from runners.forward_batch import ForwardBatch
    from runners.model_runner import ModelRunner
    from runners.padding import StepPlan


@dataclass(frozen=True)
class StepTiming:
    """One step.

    `step_ms` of an isolated step runs from the call until the sampled token ids could be read; of an
    overlapped one it is the pace, from the tokens of the step before to those of this one.
    """

    host_prepare_us: float
    replay_ms: float
    step_ms: float
    #: What the device waited for the host: see `harness.executor`.
    host_exposed_us: float
    #: Whether another process took the CPU meanwhile; None where a GPU does the work.
    preempted: bool | None = None


class StepTimer:
    """Runs decode steps on `runner` and times them; poison mode is refused in a timed step.

    A step's time ends when its token ids have been read: see `harness.host_clock`. With `flush` the cache
    is emptied before each isolated step, outside of its time.
    """

    def __init__(self, runner: ModelRunner, flush: CacheFlush | None = None) -> None:
        self._runner = runner
        self._flush = flush
        self._work = DeviceWork(runner.device)
        self._stopwatch = create_stopwatch(runner.device)
        self._stopwatches = [create_stopwatch(runner.device) for _ in range(3)]
        self._reader = TokenReader(runner.device, runner.config.max_batch_size, num_buffers=3)

    def isolated(self, batch: ForwardBatch, plan: StepPlan | None) -> StepTiming:
        """Time one step with nothing else queued on the device."""
        if self._flush is not None:
            self._flush()
        self._work.read()
        self._runner.stopwatch = self._stopwatch
        before, start = self._num_preemptions(), Instant()
        tokens = Arrival(self._reader.enqueue(self._runner.forward(batch, plan=plan)))
        self._runner.stopwatch = None
        outcome = self._runner.outcome
        assert outcome is not None
        prepare_us = outcome.host_prepare_us
        return StepTiming(
            prepare_us,
            self._stopwatch.elapsed_ms(),
            tokens.ms_since(start),
            prepare_us,
            self._was_preempted(before),
        )

    def _num_preemptions(self) -> int | None:
        """How often this process lost the CPU to another so far; None where a GPU does the work."""
        if self._runner.device.type == "cuda":
            return None
        return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw

    def _was_preempted(self, before: int | None) -> bool | None:
        now = self._num_preemptions()
        return None if now is None or before is None else now > before

    def overlapped(self, batch: ForwardBatch, plan: StepPlan | None, num_steps: int) -> list[StepTiming]:
        """Time `num_steps` steps in the steady state of two in flight.

        Each is prepared and launched while the one before runs, takes its token ids from that one on the
        device, and is read after the next launch.
        """
        n = batch.batch_size
        fed = fed_batch(batch, np.arange(n, dtype=np.int32))
        self._work.read()
        timings: list[StepTiming] = []
        pending = self._launch(batch, plan, 0)
        before: Arrival[np.ndarray] | None = None
        # The first two fill the pipeline.
        for index in range(1, num_steps + 3):
            prepare_us, num_preemptions = self._prepare_us, self._num_preemptions()
            following = self._launch(fed, plan, index)
            tokens, pending = Arrival(pending), following
            if index > 2 and before is not None:
                stopwatch, earlier = (self._stopwatches[(index - i) % 3] for i in (1, 2))
                exposed_us = max(0.0, stopwatch.idle_ms_after(earlier) * 1e3)
                step_ms = tokens.ms_since(before)
                preempted = self._was_preempted(num_preemptions)
                timings.append(StepTiming(prepare_us, stopwatch.elapsed_ms(), step_ms, exposed_us, preempted))
            before = tokens
        pending.read()
        return timings

    def _launch(self, batch: ForwardBatch, plan: StepPlan | None, index: int) -> PendingTokens:
        self._runner.stopwatch = self._stopwatches[index % 3]
        pending = self._reader.enqueue(self._runner.forward(batch, plan=plan))
        self._runner.stopwatch = None
        assert self._runner.outcome is not None
        self._prepare_us = self._runner.outcome.host_prepare_us
        return pending

    def back_to_back(self, batch: ForwardBatch, plan: StepPlan | None, num_steps: int) -> float:
        """Return the time a step in ms when `num_steps` are launched in a row and read at the end.

        The device never waits for the host to read a token, so this is the pace that a perfect
        overlap of host and device would reach.
        """
        self._work.read()
        start = Instant()
        for _ in range(num_steps):
            pending = self._reader.enqueue(self._runner.forward(batch, plan=plan))
        return Arrival(pending).ms_since(start) / num_steps
