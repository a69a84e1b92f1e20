"""Host time a step of the scheduler, its bookkeeping and the record, with the model stubbed out.

    python -m pytest tests/bench/bench_scheduler.py -s

It prints µs a step: under 150 at batch 64, and no faster growth than the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from harness.clock import FixedClock
from harness.record import JobRecord
from harness.scheduler import ScheduledStep, SchedulerLimits, SchedulerPolicy
from harness.scheduler_loop import RequestRow, StepResult, StepRow, run_loop
from harness.workload.base import Workload
from harness.workload_replay import ReplayTally, _Writer

NUM_STEPS = 2000


class StubModel:
    """Answers at once."""

    RESULT = StepResult("graph", "", 1, 1, 1.0)

    def launch(self, step: ScheduledStep) -> StubModel:
        return self

    def resolve(self) -> StepResult:
        return self.RESULT

    def preempt(self, request_ids: Sequence[int]) -> None: ...

    def finish(self, request_ids: Sequence[int]) -> None: ...


def full_batch(batch_size: int) -> Workload:
    """Enough requests of 100 tokens to decode `NUM_STEPS` full batches."""
    num_requests = batch_size * NUM_STEPS // 100
    lengths = np.full(num_requests, 100, dtype=np.int32)
    return Workload(np.zeros(num_requests), lengths, lengths, max_concurrency=batch_size)


@pytest.mark.parametrize("batch_size", [1, 4, 16, 64, 256])
def test_step(benchmark, tmp_path: Path, batch_size: int) -> None:
    workload = full_batch(batch_size)
    limits = SchedulerLimits(batch_size, batch_size * 16, 16, 512, 256)
    record = JobRecord(tmp_path)

    def replay() -> int:
        tally = ReplayTally()
        steps, requests = _Writer(record, "steps"), _Writer(record, "requests")

        def on_step(row: StepRow) -> None:
            tally.add(row)
            steps.add(row)

        def on_request(row: RequestRow) -> None:
            requests.add(row)

        run_loop(SchedulerPolicy(limits), StubModel(), FixedClock(1.0), workload, on_step, on_request)
        steps.flush()
        requests.flush()
        return tally.num_steps

    num_steps = benchmark.pedantic(replay, rounds=3, warmup_rounds=1)
    benchmark.extra_info["us_per_step"] = round(benchmark.stats["median"] / num_steps * 1e6, 1)
    print(f"\nbatch {batch_size}: {benchmark.extra_info['us_per_step']} µs a step over {num_steps} steps")
