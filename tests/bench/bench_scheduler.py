"""Host time a step of the scheduler and its bookkeeping, with the model stubbed out.

    python -m pytest tests/bench/bench_scheduler.py --benchmark-only

The figure that counts is µs a step, in the column `us_per_step` of the extra info (`--benchmark-verbose`,
or the JSON). It must stay under 150 µs at batch 64 and grow no faster than the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from harness.clock import FixedClock
from harness.scheduler import ScheduledStep, SchedulerLimits, SchedulerPolicy
from harness.scheduler_loop import StepResult, run_loop
from harness.workload.base import Workload

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
def bench_step(benchmark, batch_size: int) -> None:
    workload = full_batch(batch_size)
    limits = SchedulerLimits(batch_size, batch_size * 16, 16, 512, 256)
    rows: list[object] = []

    def replay() -> int:
        rows.clear()
        run_loop(SchedulerPolicy(limits), StubModel(), FixedClock(1.0), workload, rows.append, rows.append)
        return len(rows)

    benchmark.pedantic(replay, rounds=3, warmup_rounds=1)
    num_steps = len(rows) - len(workload)
    benchmark.extra_info["us_per_step"] = round(benchmark.stats["median"] / num_steps * 1e6, 1)
    print(f"\nbatch {batch_size}: {benchmark.extra_info['us_per_step']} µs a step over {num_steps} steps")
