"""A sweep's folder: a folder a job, and `sweep.csv`, one row a job, whole and readable at every instant.

The row of a job lies in its own folder (`point.json`), and `sweep.csv` is made from those files by whoever
ends a job, in whichever process and on whichever machine: all state is in the folder.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.durable import replace_file
from harness.errors import ConfigError, RecordError, unwritable, used_folder
from harness.exit_codes import OK, exit_code
from harness.lock import locked
from harness.record import RESULT_FILE, SCHEMA_VERSION, Status
from harness.record_reader import read_result
from harness.remedies import remedy
from harness.terminal import say

SWEEP_FILE = "sweep.csv"
#: Of a job's folder: the point that it is of, and its row.
POINT_FILE = "point.json"
#: Of the sweep's folder: which start of it is the latest.
START_FILE = "sweep.json"
#: Which job's folder has the point of a configuration's hash; each file is also the lock of that point.
_CLAIMS = "claims"
_STOPPED = "stopped"
_TABLE_LOCK = ".sweep.lock"
#: A row written without the lock is made whole by the next one; no job waits longer than this for it.
_TABLE_WAIT_S = 10.0
#: What a job that ended so would measure again is known.
FINISHED = (Status.OK, Status.PARITY_FAILED, Status.INVALID_CONFIG, Status.CAPTURE_OOM)
#: Keys of the replayed workload that a row repeats.
WORKLOAD_COLUMNS = ("mean_batch_size", "padding_waste")
#: Keys of the summary (`bench_serve.json`) that a row repeats.
SUMMARY_COLUMNS = ("median_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "median_itl_ms", "output_throughput")
SWEEP_COLUMNS = (
    "job", "status", "overrides", "graph_backend", "verified", "duration_s",
    "capture_s", *WORKLOAD_COLUMNS, *SUMMARY_COLUMNS,
    "error_kind", "error_message", "config_hash", "job_dir", "resumed_from",
)  # fmt: skip

Row = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """What `point.json` of a job's folder holds."""

    #: The point's place in the sweep, which orders the rows.
    number: int
    #: Hash of its configuration; None for one that cannot be read.
    key: str | None
    #: The start of the sweep that ran it, or found it finished.
    run: str
    row: Row


@dataclass(frozen=True)
class Claim:
    """The right to run a point."""

    path: Path
    #: False where the file system has no locks, or where a limited wait ran out.
    is_held: bool
    #: The folder of the job that had the point before.
    job_dir: Path | None

    def note(self, job_dir: Path) -> None:
        """Write down that the point is that of `job_dir`."""
        # NOTE: written in place, for a file that is replaced would be another lock.
        self.path.write_text(f"{job_dir.name}\n", encoding="utf-8")


class SweepFolder:
    """The rows of one sweep. Any number of processes may use one folder, each through an object of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def run(self) -> str:
        """The token of the latest start of this sweep."""
        try:
            return str(json.loads((self.folder / START_FILE).read_bytes())["run"])
        except FileNotFoundError:
            return ""

    def open(self, resume: bool) -> None:
        """Start the sweep, or go on with it; ConfigError if the folder cannot be had.

        Of two that start in one folder at once, one gets it.
        """
        start = self.folder / START_FILE
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not resume:
                self._take(start)
            content = {"schema_version": SCHEMA_VERSION, "run": secrets.token_hex(8)}
            replace_file(start, json.dumps(content).encode())
            (self.folder / _STOPPED).unlink(missing_ok=True)
            self._set_damaged_aside()
            self.write_table()
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def _take(self, start: Path) -> None:
        if (self.folder / RESULT_FILE).exists():
            raise used_folder(self.folder)
        try:
            if (self.folder / SWEEP_FILE).exists():
                raise FileExistsError(str(self.folder / SWEEP_FILE))
            start.touch(exist_ok=False)
        except FileExistsError as error:
            raise ConfigError(
                "output_dir",
                self.folder,
                "holds a sweep already: add sweep.resume=true to go on with it, or give another folder "
                "(sweep.id=NAME names one)",
            ) from error

    def _set_damaged_aside(self) -> None:
        """Take away each `point.json` that cannot be read, and say so: such a point has no row, and runs again."""
        for path in sorted(self.folder.glob(f"*/{POINT_FILE}")):
            try:
                read_point(path.parent)
            except RecordError as error:
                aside = path.with_name(f"{POINT_FILE}.damaged")
                os.replace(path, aside)
                say(
                    f"[{path.parent.name}] has no row until it runs again: {error} (now {aside.name})",
                    sys.stderr,
                )

    def discard(self) -> None:
        """Undo `open` where no job began: the name is free again."""
        for name in (START_FILE, SWEEP_FILE, _TABLE_LOCK, _STOPPED, "multirun.yaml"):
            (self.folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # something else is there
            self.folder.rmdir()

    def is_started(self) -> bool:
        """Return whether there is a sweep to go on with."""
        return (self.folder / START_FILE).exists()

    def points(self) -> list[Point]:
        """Return the points of all jobs that began, in the sweep's order."""
        found = (read_point(path.parent) for path in self.folder.glob(f"*/{POINT_FILE}"))
        return sorted(filter(None, found), key=lambda point: (point.number, point.row["job"]))

    def rows(self) -> list[Row]:
        """Return the rows as `sweep.csv` has them."""
        return [self.placed(point.row) for point in self.points()]

    def placed(self, row: Row) -> Row:
        """Return a row whose folders are paths: a job's folder knows its own by name only."""
        places = {key: row[key] for key in ("job_dir", "resumed_from") if row[key] is not None}
        return row | {key: str(self.folder / name) for key, name in places.items()}

    def write_table(self) -> None:
        """Make `sweep.csv` from the jobs' folders."""
        with locked(self.folder / _TABLE_LOCK, _TABLE_WAIT_S):
            replace_file(self.folder / SWEEP_FILE, _csv_bytes(self.rows()))

    @contextlib.contextmanager
    def claim(self, key: str, wait_s: float | None = None) -> Iterator[Claim]:
        """Own the point of hash `key` inside the block; waits while another process runs an equal point."""
        path = self.folder / _CLAIMS / key
        path.parent.mkdir(exist_ok=True)
        with locked(path, wait_s) as is_held:
            name = path.read_text(encoding="utf-8").strip()
            yield Claim(path, is_held, self.folder / name if name else None)

    def put(self, job_dir: Path, point: Point) -> None:
        """Write the row of a job, and the table."""
        content = {"number": point.number, "key": point.key, "run": point.run, "row": point.row}
        replace_file(job_dir / POINT_FILE, (json.dumps(content, indent=2) + "\n").encode())
        self.write_table()

    def stop(self, reason: str) -> None:
        """Let no further job of this start begin."""
        (self.folder / _STOPPED).write_text(reason, encoding="utf-8")

    @property
    def stopped(self) -> str | None:
        """Why no further job may begin; None if one may."""
        try:
            return (self.folder / _STOPPED).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None


def read_point(job_dir: Path) -> Point | None:
    """Return what `point.json` of a job's folder holds; None if it is not there, RecordError if it is damaged."""
    path = job_dir / POINT_FILE
    try:
        content = json.loads(path.read_bytes())
        row = dict(content["row"])
        return Point(int(content["number"]), content["key"], content["run"], row | {"job": str(row["job"])})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise RecordError(
            f"{path} is damaged ({reason}): sweep.resume=true sets it aside and runs the point again"
        ) from error


def row_of(job_dir: Path, overrides: str, duration_s: float | None) -> Row:
    """Return the row of the job recorded in `job_dir`."""
    result = read_result(job_dir)
    error, summary, workload = (result[part] or {} for part in ("error", "summary", "workload"))
    row = {
        "job": job_dir.name,
        "status": result["status"],
        "overrides": overrides,
        "graph_backend": result["graph_backend"],
        "verified": (result["parity"] or {}).get("verified"),
        "duration_s": None if duration_s is None else round(duration_s, 3),
        "capture_s": (result["capture"] or {}).get("seconds"),
        "error_kind": error.get("kind"),
        "error_message": error.get("message"),
        "config_hash": result["config_hash"],
        "job_dir": job_dir.name,
        "resumed_from": result["resumed_from"],
    }
    row |= {key: workload.get(key) for key in WORKLOAD_COLUMNS}
    return row | {key: summary.get(key) for key in SUMMARY_COLUMNS}


def has_failed(row: Mapping[str, Any]) -> bool:
    """Return whether a row is neither ok nor skipped."""
    return exit_code(Status(row["status"])) != OK


def _csv_bytes(rows: Iterable[Row]) -> bytes:
    text = io.StringIO()
    # A newer version may have given the row of its job more columns.
    writer = csv.DictWriter(text, SWEEP_COLUMNS, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return text.getvalue().encode()


def _cell(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value


def failure_table(failed: list[Row]) -> str:
    """Return the failed rows as text: which job, how it ended, why, what to do, and where its log is."""
    lines = [f"{len(failed)} job(s) did not end ok:"]
    for row in failed:
        message = str(row["error_message"] or "").strip().splitlines() or ["no message"]
        kind = "" if row["error_kind"] in (None, "ConfigError") else f"{row['error_kind']}: "
        lines.append(f"  {row['job']:>3}  {row['status']:<15} {row['overrides']}")
        lines.append(f"       {kind}{message[0]}")
        if todo := remedy(row):
            lines.append(f"       remedy: {todo}")
        lines.append(f"       log: {row['job_dir']}/job.log")
    return "\n".join(lines)
