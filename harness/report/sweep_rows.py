"""The jobs of a sweep as comparable rows: what was varied, how each ended, and its figures."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from harness.record import REPORT_FILE, RESULT_FILE, RecordError, Status
from harness.record_reader import job_folders, read_result, read_table
from harness.report.bootstrap import median_error
from harness.report.capture_charts import capture_seconds, graph_bytes
from harness.report.comparable import flat
from harness.report.job_page import is_unverified
from harness.sweep import SWEEP_FILE

_MIB = 1024**2
_NORMAL_95 = 1.96
_OVERRIDE = re.compile(r" (?=[+~]{0,2}[\w./@-]+=)")
#: The status of a job whose files cannot be read.
UNREADABLE = "unreadable"
#: Differ from job to job and say nothing.
_NEVER_VARIED = ("output_dir", "tracking", "job", "sweep")


@dataclass(frozen=True)
class Metric:
    """A figure that jobs are compared by; lower is better unless `is_high_good`."""

    key: str
    title: str
    unit: str
    is_high_good: bool = False


STEP_WORKLOAD = Metric("decode_step_ms", "decode step, mean over the workload", "ms")
STEP_AT_BATCH = Metric("sweep_step_ms", "step at the largest batch", "ms")
TPOT_MEDIAN = Metric("median_tpot_ms", "TPOT, median", "ms")
TPOT_P99 = Metric("p99_tpot_ms", "TPOT, p99", "ms")
GRAPH_MEMORY = Metric("graph_mib", "graph memory", "MiB")
METRICS = (
    STEP_WORKLOAD,
    STEP_AT_BATCH,
    TPOT_MEDIAN,
    TPOT_P99,
    Metric("median_ttft_ms", "TTFT, median", "ms"),
    Metric("output_throughput", "output", "tokens/s", is_high_good=True),
    GRAPH_MEMORY,
    Metric("capture_s", "capture", "s"),
    Metric("graph_share_percent", "steps by graph", "%", is_high_good=True),
    Metric("padding_percent", "padding", "%"),
    Metric("roofline_percent", "roofline share", "%", is_high_good=True),
)


@dataclass
class SweepJob:
    """One job: its name, what was varied in it, and its figures; None is not measured."""

    name: str
    status: str
    varied: dict[str, str]
    is_emulated: bool = False
    is_unverified: bool = False
    error: str = ""
    values: dict[str, float | None] = field(default_factory=dict)
    #: Half the 95% interval of `sweep_step_ms`, as a share.
    step_error: float | None = None
    #: The job's own page, relative to the sweep's, if it has one.
    page: str | None = None

    @property
    def title(self) -> str:
        """The job in a few words."""
        return f"{self.name}: " + (
            ", ".join(f"{key}={value}" for key, value in self.varied.items()) or "as configured"
        )


@dataclass(frozen=True)
class Sweep:
    """All jobs of a folder, and the batch size that `sweep_step_ms` is about."""

    folder: Path
    jobs: list[SweepJob]
    batch_size: int | None

    def title_of(self, metric: Metric) -> str:
        """Return the title of a figure, the batch size named."""
        return f"step at batch {self.batch_size}" if metric is STEP_AT_BATCH else metric.title


def read_sweep(folder: Path) -> Sweep:
    """Read every job of a sweep, also of one that still runs or was cut off.

    A job whose files cannot be read, as they are damaged or a newer version's, has a row that says so.
    """
    overrides = _overrides(folder)
    folders = _all_folders(folder)
    results: dict[str, dict[str, Any]] = {}
    sizes: dict[str, list[dict[str, Any]]] = {}
    unreadable: dict[str, str] = {}
    for name, path in folders.items():
        try:
            results[name], sizes[name] = read_result(path), read_table(path, "sizes").to_pylist()
        except RecordError as error:
            results[name], unreadable[name] = {"config": None}, str(error)
    varied = _varied(results, overrides)
    batch_size = _common_batch_size(sizes.values())
    jobs = []
    for name, result in results.items():
        if name in unreadable:
            jobs.append(SweepJob(name, UNREADABLE, varied[name], error=unreadable[name]))
            continue
        job = _job(name, result, varied[name])
        row = _row_in_force(sizes[name], batch_size)
        try:
            job.values = _values(folders[name], result, row)
            job.step_error = _step_error(folders[name], row)
        except RecordError as error:
            job = SweepJob(name, UNREADABLE, varied[name], error=str(error))
        job.page = _page(folder, folders[name])
        jobs.append(job)
    return Sweep(folder, jobs, batch_size)


def _page(folder: Path, job_dir: Path) -> str | None:
    """Return the address of a job's page from the sweep's; None if it was not made."""
    if not (job_dir / REPORT_FILE).exists():
        return None
    return quote(Path(os.path.relpath(job_dir, folder), REPORT_FILE).as_posix())


def _rows(folder: Path) -> list[dict[str, str]]:
    path = folder / SWEEP_FILE
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _overrides(folder: Path) -> dict[str, dict[str, str]]:
    """Return the overrides of each job in sweep.csv, as written."""
    written = {}
    for row in _rows(folder):
        words = _OVERRIDE.split(row.get("overrides") or "")
        written[row["job"]] = dict(word.split("=", 1) for word in words if "=" in word)
    return written


def _all_folders(folder: Path) -> dict[str, Path]:
    """Return the folder of each job. A resumed job's record lies where it ran first."""
    folders = {path.name: path for path in job_folders(folder)}
    for row in _rows(folder):
        for place in (row.get("resumed_from"), row.get("job_dir")):
            if row["job"] not in folders and place and (Path(place) / RESULT_FILE).exists():
                folders[row["job"]] = Path(place)
    return folders


def _varied(
    results: Mapping[str, Mapping[str, Any]], overrides: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, str]]:
    """Return per job the settings that differ between jobs: by override, or else by configuration."""
    settings = {name: dict(overrides.get(name, {})) for name in results}
    if not any(settings.values()):
        configs = {name: flat(result["config"] or {}) for name, result in results.items()}
        settings = {
            name: {key: str(value) for key, value in config.items() if key.split(".")[0] not in _NEVER_VARIED}
            for name, config in configs.items()
        }
    keys = dict.fromkeys(key for setting in settings.values() for key in setting)
    differing = [
        key for key in keys if len({setting.get(key) for setting in settings.values() if setting}) > 1
    ]
    return {
        name: {key: setting[key] for key in differing if key in setting} for name, setting in settings.items()
    }


def _common_batch_size(sizes: Any) -> int | None:
    """Return the largest batch size that most of the jobs with a size sweep measured."""
    measured = [{row["batch_size"] for row in rows} for rows in sizes if rows]
    counts = {size: sum(size in have for have in measured) for have in measured for size in have}
    wanted = max(counts.values(), default=0)
    return max((size for size, count in counts.items() if count == wanted), default=None)


def _row_in_force(rows: Sequence[Mapping[str, Any]], batch_size: int | None) -> Mapping[str, Any] | None:
    """Return the first row of a batch size: the plan that the strategy chose."""
    return next(
        (row for row in rows if row["batch_size"] == batch_size and row["step_ms_p50"] is not None), None
    )


def _job(name: str, result: Mapping[str, Any], varied: dict[str, str]) -> SweepJob:
    error = result["error"] or {}
    return SweepJob(
        name=name,
        status=result["status"],
        varied=varied,
        is_emulated=result["graph_backend"] == "emulated",
        is_unverified=is_unverified(result),
        error=f"{error.get('kind')}: {error.get('message')}" if error else "",
    )


def _values(path: Path, result: Mapping[str, Any], row: Mapping[str, Any] | None) -> dict[str, float | None]:
    summary, workload = result["summary"] or {}, result["workload"] or {}
    capture = read_table(path, "capture").to_pylist()
    num_bytes = graph_bytes(capture)
    shares = workload.get("mode_shares")
    return {
        STEP_WORKLOAD.key: _mean_decode_step(path),
        STEP_AT_BATCH.key: row["step_ms_p50"] if row else None,
        **{
            key: summary.get(key)
            for key in ("median_tpot_ms", "p99_tpot_ms", "median_ttft_ms", "output_throughput")
        },
        # A job without graphs has none in memory either.
        GRAPH_MEMORY.key: 0.0 if _is_eager(result) else None if num_bytes is None else num_bytes / _MIB,
        "capture_s": capture_seconds(capture),
        "graph_share_percent": _percent(
            shares.get("graph", 0.0) + shares.get("split", 0.0) if shares else None
        ),
        "padding_percent": _percent(workload.get("padding_waste")),
        "roofline_percent": _percent(row["roofline_fraction"] if row else None),
    }


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _is_eager(result: Mapping[str, Any]) -> bool:
    is_measured = result["status"] in (Status.OK, Status.SKIPPED)
    return is_measured and ((result["config"] or {}).get("runner") or {}).get("kind") == "eager"


def _mean_decode_step(path: Path) -> float | None:
    import pyarrow.compute as pc

    table = read_table(path, "steps")
    if not len(table):
        return None
    mean = pc.mean(table.filter(pc.equal(table["phase"], "decode"))["step_ms"]).as_py()
    return None if mean is None else float(mean)


def _step_error(path: Path, row: Mapping[str, Any] | None) -> float | None:
    import pyarrow.compute as pc

    if row is None:
        return None
    table = read_table(path, "samples")
    chosen = pc.equal(table["batch_size"], row["batch_size"])
    for name in ("context_len", "padded_batch_size", "mode"):
        if row[name] is not None:
            chosen = pc.and_(chosen, pc.equal(table[name], row[name]))
    chosen = pc.and_(chosen, pc.not_equal(pc.fill_null(table["timing"], "isolated"), "back_to_back"))
    samples = table.filter(chosen)["step_ms"].drop_null().to_numpy()
    return _NORMAL_95 * median_error(np.asarray(samples)).log_error if len(samples) > 1 else None
