"""A sweep's folder: one row a job in `sweep.csv`, whole and readable at every instant."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.durable import replace_file
from harness.exit_codes import OK, exit_code
from harness.record import Status
from harness.record_reader import read_result

SWEEP_FILE = "sweep.csv"
#: Keys of the replayed workload that a row repeats.
WORKLOAD_COLUMNS = ("mean_batch_size", "padding_waste")
#: Keys of the summary (`bench_serve.json`) that a row repeats.
SUMMARY_COLUMNS = ("median_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "median_itl_ms", "output_throughput")
SWEEP_COLUMNS = (
    "job", "status", "overrides", "graph_backend", "verified", "duration_s",
    "capture_s", *WORKLOAD_COLUMNS, *SUMMARY_COLUMNS,
    "error_kind", "error_message", "config_hash", "job_dir", "resumed_from",
)  # fmt: skip


class SweepTable:
    """The rows of one sweep, in the order in which the jobs ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[dict[str, Any]] = []

    def add(self, job_dir: Path, overrides: str, duration_s: float) -> dict[str, Any]:
        """Add the job recorded in `job_dir`, rewrite `sweep.csv` and return the row."""
        result = read_result(job_dir)
        error, summary, workload = (result[part] or {} for part in ("error", "summary", "workload"))
        row = {
            "job": job_dir.name,
            "status": result["status"],
            "overrides": overrides,
            "graph_backend": result["graph_backend"],
            "verified": (result["parity"] or {}).get("verified"),
            "duration_s": round(duration_s, 3),
            "capture_s": (result["capture"] or {}).get("seconds"),
            "error_kind": error.get("kind"),
            "error_message": error.get("message"),
            "config_hash": result["config_hash"],
            "job_dir": str(job_dir),
            "resumed_from": result["resumed_from"],
        }
        row |= {key: workload.get(key) for key in WORKLOAD_COLUMNS}
        row |= {key: summary.get(key) for key in SUMMARY_COLUMNS}
        self.rows.append(row)
        replace_file(self.folder / SWEEP_FILE, _csv_bytes(self.rows))
        return row

    @property
    def statuses(self) -> list[Status]:
        """The status of each row."""
        return [Status(row["status"]) for row in self.rows]

    def failed(self) -> list[dict[str, Any]]:
        """Return the rows that are neither ok nor skipped."""
        return [row for row in self.rows if exit_code(Status(row["status"])) != OK]


def _csv_bytes(rows: Iterable[dict[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, SWEEP_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return text.getvalue().encode()


def _cell(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value


def failure_table(failed: list[dict[str, Any]]) -> str:
    """Return the failed rows as text: which job, how it ended, why, and where its log is."""
    lines = [f"{len(failed)} job(s) did not end ok:"]
    for row in failed:
        message = str(row["error_message"] or "").strip().splitlines() or ["no message"]
        lines.append(f"  {row['job']:>3}  {row['status']:<15} {row['overrides']}")
        lines.append(f"       {message[0]}")
        lines.append(f"       log: {row['job_dir']}/job.log")
    return "\n".join(lines)
