"""What a W&B run holds of a recorded job: metrics, tables, plots, summary and the record itself."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.floor import Floor, workload_floor
from harness.objective import FIGURES
from harness.record import BENCH_SERVE_FILE, PARTS_DIR, REPORT_FILE, RESULT_FILE, STREAMS, Status
from harness.record_reader import read_bench_serve, read_table
from harness.remedies import remedy

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

#: A run is slow to load with more points or rows; the artifact has them all.
MAX_STEPS_LOGGED = 2_000
MAX_TABLE_ROWS = 10_000

#: Metrics of `sizes.csv` drawn over the batch size, and of `steps.parquet` drawn over the step.
SIZE_METRICS = (
    "host_prepare_us_p50",
    "replay_ms_p50",
    "step_ms_p50",
    "step_ms_p99",
    "roofline_fraction",
    "rel_std",
    "sm_clock_mhz",
    "power_w",
    "energy_mj_per_token",
)
STEP_METRICS = (
    "clock_ms", "batch_size", "padded_batch_size", "num_graphs", "num_tokens", "num_kv_tokens",
    "host_prepare_us", "host_exposed_us", "replay_ms", "step_ms",
)  # fmt: skip
MEMORY_CLASSES = ("pool_bytes", "torch_bytes", "device_bytes", "pinned_bytes")
_CAPTURE_METRICS = ("compile_s", "warmup_s", "capture_s", *MEMORY_CLASSES, "num_nodes")
#: Summary key → the figure of `job.objective` that it holds: what a dashboard compares runs by.
FIGURE_KEYS = {
    f"figures/{name.partition('.')[2]}": name for name in FIGURES if not name.startswith("summary.")
}
#: Summary keys that every run has.
STATUS_KEY, FAILED_KEY = "job/status", "job/failed"
#: The table of one row that a run of a failed job has.
FAILURE_TABLE = "failure"
#: How a job ends that has not failed.
GOOD = (Status.OK, Status.SKIPPED)

Row = Mapping[str, Any]


class History:
    """Logs at a step of its own that only grows: W&B drops whatever comes at a lower one."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._step = 0

    def log(self, values: Mapping[str, Any]) -> None:
        """Log the values that were measured; null ones are left out."""
        measured = {key: value for key, value in values.items() if value is not None}
        self._run.log(measured, step=self._step)
        self._step += 1


def write_content(run: Run, job_dir: Path, result: Mapping[str, Any]) -> None:
    """Write everything into the open run; the caller finishes it."""
    capture, sizes, steps, requests, profile = (
        _rows(job_dir, name) for name in ("capture", "sizes", "steps", "requests", "profile")
    )
    emulated = " (emulated)" if result["graph_backend"] == "emulated" else ""
    define_metrics(run)
    history = History(run)
    log_steps(history, steps, workload_floor(result))
    log_sizes(history, sizes)
    log_captures(history, capture)
    tables = {
        "capture": capture,
        "sizes": sizes,
        "requests": _thin(requests, MAX_TABLE_ROWS),
        "profile": profile[:MAX_TABLE_ROWS],
    }
    for name, rows in tables.items():
        if rows:
            history.log({name: _table(rows)})
    if sizes:
        history.log({"latency_against_batch_size": _latency_plot(sizes, emulated)})
    if capture:
        history.log({"memory_against_capture_size": _memory_plot(capture)})
    log_outcome(history, job_dir, result)
    run.summary.update(summary_of(job_dir, result))
    run.summary.update(read_bench_serve(job_dir) or {})
    telemetry = (result["workload"] or {}).get("telemetry") or {}
    if telemetry.get("energy_mj_per_token") is not None:
        run.summary.update({"energy_mj_per_token": telemetry["energy_mj_per_token"]})
    log_record(run, job_dir, result)


def define_metrics(run: Run) -> None:
    """Bind step metrics to the step, size metrics to the batch size, captures to the capture size.

    None of them goes into the summary, which holds the keys of `bench_serve.json`.
    """
    for axis, metrics in (("step", "steps/*"), ("batch_size", "sizes/*"), ("capture_size", "captures/*")):
        run.define_metric(axis, hidden=True, summary="none")
        run.define_metric(metrics, step_metric=axis, summary="none")


def log_steps(history: History, steps: list[Row], floor: Floor | None = None) -> None:
    """Log the workload's steps over the step, thinned evenly; decode steps also as a share of the floor."""
    for row in _thin(steps, MAX_STEPS_LOGGED):
        values = {f"steps/{name}": row[name] for name in STEP_METRICS}
        if floor is not None and row["phase"] == "decode" and row["step_ms"]:
            values["steps/roofline_fraction"] = floor.step_ms(row["num_kv_tokens"]) / row["step_ms"]
        history.log({"step": row["step"], **values})


def log_sizes(history: History, sizes: list[Row]) -> None:
    """Log a line a mode (and a context length, if there are several) over the batch size."""
    contexts = {row["context_len"] for row in sizes}
    for row in sizes:
        series = f"sizes/{row['mode']}" + (f"/context_{row['context_len']}" if len(contexts) > 1 else "")
        history.log(
            {"batch_size": row["batch_size"], **{f"{series}/{name}": row[name] for name in SIZE_METRICS}}
        )


def log_captures(history: History, capture: list[Row]) -> None:
    """Log cost and memory of each capture, smallest size first."""
    for row in sorted(capture, key=lambda row: row["capture_size"]):
        metrics = {f"captures/{name}": row[name] for name in _CAPTURE_METRICS}
        history.log({"capture_size": row["capture_size"], **metrics})


def log_outcome(history: History, job_dir: Path, result: Mapping[str, Any]) -> None:
    """Log how a failed job ended, and what to do about it, as a table of one row."""
    if result["status"] in GOOD:
        return
    error = result["error"] or {}
    row = {
        "job": job_dir.name,
        "status": result["status"],
        "error_kind": error.get("kind"),
        "error_message": error.get("message"),
    }
    history.log({FAILURE_TABLE: _table([row | {"remedy": remedy(row)}])})


def summary_of(job_dir: Path, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status and, of a job that ended ok, the figures measured, by their summary keys."""
    status = {STATUS_KEY: str(result["status"]), FAILED_KEY: int(result["status"] not in GOOD)}
    if result["status"] != Status.OK:
        return status
    figures = {key: FIGURES[name][0](job_dir, result) for key, name in FIGURE_KEYS.items()}
    return status | {key: value for key, value in figures.items() if value is not None}


def log_record(run: Run, job_dir: Path, result: Mapping[str, Any]) -> None:
    """Attach the record as an artifact.

    `result.json` goes in as a copy: it changes once more when the outcome of publishing is noted, and
    `wandb sync` would then find another digest.
    """
    import wandb

    metadata = {key: result[key] for key in ("status", "schema_version", "config_hash", "graph_backend")}
    artifact = wandb.Artifact(f"record-{run.id}", type="record", metadata=metadata)
    snapshot = Path(run.dir) / RESULT_FILE
    shutil.copyfile(job_dir / RESULT_FILE, snapshot)
    artifact.add_file(str(snapshot), policy="immutable", skip_cache=True)
    for path in recorded_files(job_dir):
        name = path.relative_to(job_dir).as_posix()
        artifact.add_file(str(path), name=name, policy="immutable", skip_cache=True)
    run.log_artifact(artifact)


def recorded_files(job_dir: Path) -> list[Path]:
    """Return the files of a record beside `result.json`, the parts of a job that died included."""
    names = [*(stream.file_name for stream in STREAMS.values()), BENCH_SERVE_FILE, REPORT_FILE]
    finished = [job_dir / name for name in names if (job_dir / name).exists()]
    return finished + sorted((job_dir / PARTS_DIR).glob("*.jsonl"))


def _rows(job_dir: Path, stream: str) -> list[Row]:
    rows: list[Row] = read_table(job_dir, stream).to_pylist()
    return rows


def _thin(rows: list[Row], max_rows: int) -> list[Row]:
    return rows[:: max(1, math.ceil(len(rows) / max_rows))]


def _table(rows: Iterable[Row]) -> Any:
    import wandb

    rows = list(rows)
    columns: list[str | int] = [*rows[0]]
    return wandb.Table(columns=columns, data=[list(row.values()) for row in rows])


def _latency_plot(sizes: list[Row], emulated: str) -> Any:
    import wandb

    columns = ("batch_size", "step_ms_p50", "mode")
    table = _table({name: row[name] for name in columns} for row in sizes)
    title = f"Step latency (ms, p50) against batch size{emulated}"
    return wandb.plot.line(table, "batch_size", "step_ms_p50", stroke="mode", title=title)


def _memory_plot(capture: list[Row]) -> Any:
    import wandb

    rows = sorted(capture, key=lambda row: row["capture_size"])
    table = _table(
        {"capture_size": row["capture_size"], "bytes": row[name], "memory": name}
        for row in rows
        for name in MEMORY_CLASSES
    )
    title = "Memory added by each capture (bytes) against capture size"
    return wandb.plot.line(table, "capture_size", "bytes", stroke="memory", title=title)
