"""`job.objective`: the figures of a recorded job by dotted name, as a sweeper that searches wants them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import ConfigError
from harness.record import Status
from harness.record_reader import read_result, read_table
from harness.suggest import did_you_mean

if TYPE_CHECKING:
    from harness.schema import Config

_MIB = 1024**2
_LATENCIES = [
    f"{statistic}_{latency}_ms"
    for latency in ("ttft", "tpot", "itl", "e2el")
    for statistic in ("mean", "median", "std", "p99")
]
#: Keys of the summary, which are those of `vllm bench serve`.
SUMMARY_KEYS = (
    "duration", "completed", "total_output_tokens", "request_throughput", "output_throughput",
    "total_token_throughput", "max_output_tokens_per_s", *_LATENCIES,
)  # fmt: skip

Reader = Callable[[Path, Mapping[str, Any]], float | None]


def _part(part: str, key: str) -> Reader:
    return lambda job_dir, result: (result[part] or {}).get(key)


def _mean_decode_ms(job_dir: Path, result: Mapping[str, Any]) -> float | None:
    steps = read_table(job_dir, "steps").to_pydict()
    times = [
        ms for ms, phase in zip(steps["step_ms"], steps["phase"], strict=True) if phase == "decode" and ms
    ]
    return sum(times) / len(times) if times else None


def _largest_step_ms(job_dir: Path, result: Mapping[str, Any]) -> float | None:
    rows = [row for row in read_table(job_dir, "sizes").to_pylist() if row["step_ms_p50"] is not None]
    if not rows:
        return None
    largest = max(row["batch_size"] for row in rows)
    # The first row of a batch size is the plan that the strategy chose.
    return float(next(row["step_ms_p50"] for row in rows if row["batch_size"] == largest))


def _graph_mib(job_dir: Path, result: Mapping[str, Any]) -> float | None:
    from harness.report.capture_charts import graph_bytes

    num_bytes = graph_bytes(read_table(job_dir, "capture").to_pylist())
    return None if num_bytes is None else num_bytes / _MIB


def _num_sizes(job_dir: Path, result: Mapping[str, Any]) -> float | None:
    return None if result["capture"] is None else len(result["capture"]["sizes"])


#: Dotted name → how it is read, and the phase that measures it.
FIGURES: dict[str, tuple[Reader, str]] = {
    **{f"summary.{key}": (_part("summary", key), "workload") for key in SUMMARY_KEYS},
    "workload.mean_batch_size": (_part("workload", "mean_batch_size"), "workload"),
    "workload.padding_waste": (_part("workload", "padding_waste"), "workload"),
    "steps.mean_decode_ms": (_mean_decode_ms, "workload"),
    "sizes.largest_step_ms": (_largest_step_ms, "measure"),
    "capture.seconds": (_part("capture", "seconds"), "capture"),
    "capture.graph_mib": (_graph_mib, "capture"),
    "capture.num_sizes": (_num_sizes, "capture"),
}


def check_objective(config: Config) -> None:
    """Raise ConfigError for a name that is no figure, or one that this job will not measure."""
    for name in config.job.objective:
        if name not in FIGURES:
            latencies = "summary.<mean|median|std|p99>_<ttft|tpot|itl|e2el>_ms"
            others = [figure for figure in FIGURES if not figure.endswith(tuple(_LATENCIES))]
            near = name if "." in name else f"summary.{name}"
            raise ConfigError(
                "job.objective",
                name,
                f"no such figure{did_you_mean(near, FIGURES)}; there are {latencies}, {', '.join(others)}",
            )
        phase = FIGURES[name][1]
        if phase in ("workload", "measure") and not getattr(config, phase).enabled:
            raise ConfigError(
                "job.objective", name, f"is not measured with {phase}.enabled=false: choose another"
            )


def objective_value(job_dir: Path | None, names: Sequence[str]) -> float | list[float]:
    """Return the figure `names[0]` of the recorded job, or a list where several are named.

    NaN for what was not measured, for all of a job that did not end ok, and without a job: a search must not
    take it for a good one.
    """
    values = [math.nan] * len(names) if job_dir is None else _values(job_dir, names)
    return values[0] if len(values) == 1 else values


def _values(job_dir: Path, names: Sequence[str]) -> list[float]:
    result = read_result(job_dir)
    if result["status"] != Status.OK:
        return [math.nan] * len(names)
    values = [FIGURES[name][0](job_dir, result) for name in names]
    return [math.nan if value is None else float(value) for value in values]
