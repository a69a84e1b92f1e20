"""The workload replay: the scheduler serves the requests on the runner, against a virtual clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.build import scheduler_limits
from harness.clock import Clock, CostClock, FixedClock, MeasuredClock
from harness.cost_clock import load_step_cost
from harness.executor import ModelExecutor
from harness.scheduler import SchedulerPolicy
from harness.scheduler_loop import RequestRow, StepRow, run_loop

if TYPE_CHECKING:
    from harness.record import JobRecord
    from harness.schema import Config, WorkloadConfig
    from harness.workload.base import Workload
    from runners.model_runner import ModelRunner

#: Rows that are written at once: recording costs no step anything, but it does cost time.
_ROWS_PER_WRITE = 512


@dataclass
class ReplayTally:
    """What the decode steps of a replay add up to."""

    num_steps: int = 0
    num_decode_steps: int = 0
    num_rows: int = 0
    num_padded_rows: int = 0
    num_preemptions: int = 0
    mode_steps: Counter[str] = field(default_factory=Counter)
    reason_steps: Counter[str] = field(default_factory=Counter)
    batch_size_steps: Counter[int] = field(default_factory=Counter)

    def add(self, row: StepRow) -> None:
        self.num_steps += 1
        if row["phase"] != "decode":
            return
        self.num_decode_steps += 1
        self.num_rows += row["batch_size"]
        self.num_padded_rows += row["padded_batch_size"]
        self.mode_steps[row["mode"]] += 1
        self.batch_size_steps[row["batch_size"]] += 1
        if row["reason"]:
            self.reason_steps[row["reason"]] += 1

    def as_dict(self) -> dict[str, Any]:
        """Return the counts, and the shares of them; None where no decode step ran."""
        steps, rows = self.num_decode_steps, self.num_padded_rows
        return {
            "num_steps": self.num_steps,
            "num_decode_steps": steps,
            "num_preemptions": self.num_preemptions,
            "mode_shares": {mode: count / steps for mode, count in sorted(self.mode_steps.items())},
            "reason_steps": dict(sorted(self.reason_steps.items())),
            "batch_size_steps": {str(size): count for size, count in sorted(self.batch_size_steps.items())},
            "mean_batch_size": self.num_rows / steps if steps else None,
            "padding_waste": (rows - self.num_rows) / rows if rows else None,
        }


class _Writer:
    """Writes a stream's rows in groups."""

    def __init__(self, record: JobRecord, stream: str) -> None:
        self._record, self._stream = record, stream
        self._rows: list[Any] = []

    def add(self, row: StepRow | RequestRow) -> None:
        self._rows.append(row)
        if len(self._rows) >= _ROWS_PER_WRITE:
            self.flush()

    def flush(self) -> None:
        if self._rows:
            self._record.append_many(self._stream, self._rows)
            self._rows = []


def replay_workload(
    runner: ModelRunner,
    workload: Workload,
    config: Config,
    record: JobRecord,
    on_answer: Callable[[], object],
) -> tuple[ReplayTally, dict[str, Any]]:
    """Serve every request once; return what the steps add up to and the summary in vLLM's keys.

    Rows of steps and requests are written as they come, also when the replay is cut short.
    """
    policy = SchedulerPolicy(scheduler_limits(config))
    tally, executor = ReplayTally(), ModelExecutor(runner, config.seed)
    steps, requests = _Writer(record, "steps"), _Writer(record, "requests")

    def on_step(row: StepRow) -> None:
        tally.add(row)
        steps.add(row)
        executor.look_at_clocks()

    def on_request(row: RequestRow) -> None:
        requests.add(row)
        on_answer()

    try:
        summary = run_loop(policy, executor, _clock(config.workload), workload, on_step, on_request)
    finally:
        executor.close()
        steps.flush()
        requests.flush()
    tally.num_preemptions = policy.num_preemptions
    return tally, summary.bench_serve()


def _clock(workload: WorkloadConfig) -> Clock:
    if workload.clock == "fixed":
        assert workload.fixed_step_ms is not None, "check_clock asks for it"
        return FixedClock(workload.fixed_step_ms)
    if workload.clock == "costs":
        assert workload.costs_path is not None, "check_clock asks for it"
        return CostClock(load_step_cost(workload.costs_path))
    return MeasuredClock()
