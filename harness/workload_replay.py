"""The workload replay: the scheduler serves the requests on the runner, against a virtual clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.build import scheduler_limits
from harness.clock import Clock, CostClock, MeasuredClock
from harness.errors import ConfigError
from harness.executor import ModelExecutor
from harness.forecast import clock_times
from harness.record import STREAMS
from harness.scheduler import SchedulerPolicy
from harness.scheduler_loop import RequestRow, StepRow, run_loop
from harness.telemetry import Reading, Telemetry, ranges
from runners.padding import StepCosts

if TYPE_CHECKING:
    from harness.latencies import LatencySummary
    from harness.record import JobRecord
    from harness.schema import Config, WorkloadConfig
    from harness.workload.base import Workload
    from runners.model_runner import ModelRunner

#: Rows that are written at once: recording costs no step anything, but it does cost time.
_ROWS_PER_WRITE = 512

#: What no clock changes; under `measured` all other columns differ from run to run.
_SAME_COLUMNS = {"step", "request_id", "arrival_s", "prompt_len", "output_len", "status"}
#: Strategies that choose by measured costs.
_BY_COSTS = ("cheapest", "split")


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
    mode_rows: Counter[str] = field(default_factory=Counter)
    batch_size_steps: Counter[int] = field(default_factory=Counter)
    #: What the card told during the replay; None without one.
    telemetry: dict[str, Any] | None = None

    def add(self, row: StepRow) -> None:
        self.num_steps += 1
        if row["phase"] != "decode":
            return
        self.num_decode_steps += 1
        self.num_rows += row["batch_size"]
        self.num_padded_rows += row["padded_batch_size"]
        self.mode_steps[row["mode"]] += 1
        self.mode_rows[row["mode"]] += row["batch_size"]
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
            "mode_mean_batch_size": {
                mode: self.mode_rows[mode] / count for mode, count in sorted(self.mode_steps.items())
            },
            "reason_steps": dict(sorted(self.reason_steps.items())),
            "batch_size_steps": {str(size): count for size, count in sorted(self.batch_size_steps.items())},
            "mean_batch_size": self.num_rows / steps if steps else None,
            "padding_waste": (rows - self.num_rows) / rows if rows else None,
            "telemetry": self.telemetry,
        }


class _Writer:
    """Writes a stream's rows in groups."""

    def __init__(self, record: JobRecord, stream: str) -> None:
        self._record, self._stream = record, stream
        self._rows: list[Any] = []

    def add(self, row: Mapping[str, Any]) -> None:
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
    telemetry: Telemetry | None = None,
) -> tuple[ReplayTally, LatencySummary]:
    """Serve every request once; return what the steps add up to, and the latencies.

    Rows of steps and requests are written as they come, also when the replay is cut short.
    """
    policy = SchedulerPolicy(scheduler_limits(config, runner.config.num_kv_pages))
    max_in_flight = 2 if config.runner.overlap else 1
    card = telemetry or Telemetry.of(runner.device)
    tally, executor = ReplayTally(), ModelExecutor(runner, config.seed, max_in_flight, card)
    before_mj = card.energy_mj()
    steps, requests = _Writer(record, "steps"), _Writer(record, "requests")

    def on_step(row: StepRow) -> None:
        tally.add(row)
        steps.add({**row, "graph_backend": "none" if row["mode"] == "eager" else runner.graph_backend})
        executor.look_at_card()

    def on_request(row: RequestRow) -> None:
        requests.add(row)
        on_answer()

    try:
        latencies = run_loop(
            policy, executor, _clock(config.workload), workload, on_step, on_request, max_in_flight
        )
    finally:
        executor.close()
        steps.flush()
        requests.flush()
    tally.num_preemptions = policy.num_preemptions
    if card.is_there:
        num_tokens = latencies.num_output_tokens
        tally.telemetry = _telemetry(executor.readings, before_mj, card.energy_mj(), num_tokens)
    return tally, latencies


def _telemetry(
    readings: Sequence[Reading], before_mj: int | None, after_mj: int | None, num_tokens: int
) -> dict[str, Any]:
    """Sum up a replay: the range of each figure, how often the card was held, and its energy.

    The energy is the card's own from the first step to the last, idle moments of the host included.
    """
    energy_mj = None if before_mj is None or after_mj is None else after_mj - before_mj
    return {
        **ranges(readings),
        "num_looks": len(readings),
        "num_throttled_looks": sum(bool(reading.is_throttled) for reading in readings),
        "energy_j": None if energy_mj is None else energy_mj / 1e3,
        "energy_mj_per_token": energy_mj / num_tokens if energy_mj is not None and num_tokens else None,
    }


def _clock(workload: WorkloadConfig) -> Clock:
    times = clock_times(workload)
    return MeasuredClock() if times is None else CostClock(times.cost_ms)


def differing_columns(workload: WorkloadConfig) -> dict[str, list[str]]:
    """Return the columns of the workload's files that another run of the same configuration changes.

    Rows of requests stand in the order of their answers, so they are compared by `request_id`.
    """
    if workload.clock != "measured":
        return {}
    return {
        name: [column for column in STREAMS[name].columns if column not in _SAME_COLUMNS]
        for name in ("steps", "requests")
    }


def describe_clock(workload: WorkloadConfig) -> str:
    """Say in a line what the clock does to the figures."""
    if workload.clock == "measured":
        return "clock: measured; another run has other step times, and so other batches and latencies"
    if workload.clock == "costs":
        return f"clock: the costs in {workload.costs_path}; every run gives the same files"
    eager_ms = workload.fixed_eager_step_ms
    eager = "" if eager_ms is None else f", {eager_ms:g} ms an eager decode step"
    return f"clock: {workload.fixed_step_ms:g} ms a step{eager}; every run gives the same files"


def use_costs_of_clock(runner: ModelRunner, config: Config) -> str | None:
    """Let the strategies that choose by costs believe those that the clock charges.

    Returns a warning if they choose by this run's own measurement, which the next run changes. Raises
    ConfigError for costs of emulated graphs where real ones run: no latency may be taken for theirs.
    """
    graphs, workload = runner.graph_runner, config.workload
    if graphs is None or workload.clock == "measured":
        return None
    costs = StepCosts() if workload.costs_path is None else StepCosts.from_sizes_csv(workload.costs_path)
    if workload.clock == "costs" and costs.graph_backend == "emulated" != graphs.graph_backend:
        raise ConfigError(
            "workload.costs_path",
            workload.costs_path,
            "measured on emulated graphs, whose times say nothing of this GPU: give a run on a GPU",
        )
    if config.padding.strategy not in _BY_COSTS or config.padding.costs_path is not None:
        return None
    if workload.clock == "costs" and costs.graph_backend in (None, graphs.graph_backend):
        graphs.set_step_costs(costs)
        return None
    if not config.measure.enabled:
        return None
    return (
        f"padding.strategy={config.padding.strategy} chooses by this run's own size sweep, so that another run may "
        f"replay other graphs although workload.clock={workload.clock}: give padding.costs_path"
    )
