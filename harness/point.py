"""One point of a sweep, from its resolved configuration to its row, whatever happens to it.

All that it needs is in `PointTask` and in the sweep's folder, so that it runs the same in the process of the
sweep, in a worker, and on another machine that shares the folder.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.config_hash import cached_commit, expected_hash
from harness.errors import ConfigError, RecordError
from harness.isolation import CONFIG_FILE, conclude, log_failure, run_isolated
from harness.record import RESULT_FILE, JobRecord, Status
from harness.record_reader import is_newer, read_result
from harness.schema import Config, check, load_config
from harness.sweep import FINISHED, Point, Row, SweepFolder, has_failed, read_point, row_of
from harness.terminal import say


@dataclass(frozen=True)
class PointTask:
    """What a launcher hands to whichever process runs a point; picklable."""

    sweep_dir: Path
    #: Where it runs, a folder in `sweep_dir` that the launcher made.
    job_dir: Path
    #: Its place in the sweep.
    number: int
    #: As they were written on the command line.
    overrides: str
    #: The resolved configuration as YAML, or what is wrong with it.
    configuration: str | ConfigError
    #: `sweep.stop_on_first_failure`
    stops_on_failure: bool = False
    #: Variables that its process gets: which GPU it may use.
    environment: Mapping[str, str] = field(default_factory=dict)


def run_point(task: PointTask) -> Row:
    """Run a point, or find it finished, and return its row as `sweep.csv` has it.

    An equal point of this sweep that ended, or one of an earlier start that needs no second run, is not run
    again: its row is copied, with `resumed_from`. KeyboardInterrupt passes through once the row says
    `interrupted`.
    """
    run = _PointRun(task)
    try:
        row = run.run()
    except KeyboardInterrupt:
        run.interrupt()
        raise
    if task.stops_on_failure and has_failed(row) and row["resumed_from"] is None:
        run.sweep.stop(f"job {row['job']} failed and sweep.stop_on_first_failure=true")
    return row


def run_aloud(task: PointTask) -> Row:
    """Run a point and say which one, and how it ended."""
    say(f"[{task.job_dir.name}] {task.overrides}")
    row = run_point(task)
    ending = f"as {row['resumed_from']} found" if row["resumed_from"] else f"after {row['duration_s']:.1f} s"
    say(f"[{task.job_dir.name}] {row['status']} {ending}")
    return row


def conclude_point(task: PointTask, status: Status, reason: str) -> Row:
    """End a point whose process is gone, or never began, and return its row: what it recorded as its end stays.

    As in `conclude`, `reason` is one word for `killed`. A process that was ended by a signal is `interrupted` or
    out of time where `status` says so: whoever sent the signal knows better.
    """
    return _PointRun(task).conclude(status, reason)


def row_of_point(task: PointTask) -> Row | None:
    """Return the row of a point; None if this start of the sweep has not begun it."""
    there = _PointRun(task).there()
    return None if there is None else there.row


class _PointRun:
    """A point on its way to its row."""

    def __init__(self, task: PointTask) -> None:
        self.task = task
        self.sweep = SweepFolder(task.sweep_dir)
        self.token = self.sweep.run
        self.job_dir = task.job_dir
        #: Hash of its configuration, once that could be read.
        self.key: str | None = None
        self.started_s = time.monotonic()
        self.has_begun = False

    def run(self) -> Row:
        stopped = self.sweep.stopped
        if stopped is not None:
            return self._skip(stopped)
        try:
            config = self._read()
        except ConfigError as error:
            return self._refuse(error)
        self.key = expected_hash(config)
        with self.sweep.claim(self.key) as claim:
            earlier = claim.job_dir
            if earlier is not None and self._is_done(config, earlier):
                return self._copy(earlier)
            self._take_folder(earlier)
            claim.note(self.job_dir)
            try:
                check(config)
            except ConfigError as error:
                return self._refuse(error)
            return self._measure(config)

    def interrupt(self) -> None:
        """Write the row of a point that was cancelled, if it had begun."""
        if self.has_begun:
            conclude(self.job_dir, Status.INTERRUPTED, "interrupted")
            self._end()

    def there(self) -> Point | None:
        """Return what this start of the sweep wrote of the point so far."""
        points = (p for p in self.sweep.points() if (p.number, p.run) == (self.task.number, self.token))
        return next(points, None)

    def conclude(self, status: Status, reason: str) -> Row:
        """Write the status of a point that could not."""
        there = self.there()
        if there is None:
            with suppress(ConfigError):
                self.key = expected_hash(self._read())
            duration_s = None
        else:
            self.job_dir, self.key = self.sweep.folder / there.row["job"], there.key
            duration_s = there.row["duration_s"]
            if there.row["resumed_from"] is not None:
                return self.sweep.placed(there.row)
        recorded = conclude(self.job_dir, status, reason)
        if recorded in (Status.KILLED, Status.INTERRUPTED) and status in (Status.INTERRUPTED, Status.TIMEOUT):
            error = {"kind": status.name.title(), "message": reason, "traceback": None}
            JobRecord.attach(self.job_dir).update(status=status, error=error)
        row = row_of(self.job_dir, self.task.overrides, duration_s)
        return self._put(row | {"config_hash": row["config_hash"] or self.key})

    def _read(self) -> Config:
        if isinstance(self.task.configuration, ConfigError):
            raise self.task.configuration
        return load_config(self.task.configuration)

    def _is_done(self, config: Config, earlier: Path) -> bool:
        """Return whether the job of an equal point says all that this one would."""
        there = read_point(earlier)
        if there is None or not (earlier / RESULT_FILE).exists():
            return False
        try:
            result = read_result(earlier)
        except RecordError as error:
            say(f"[{earlier.name}] runs again: {error}", sys.stderr)
            return False
        status = Status(result["status"])
        if there.run == self.token:
            # Interrupted in this very start: a cluster has put its job back in the queue.
            return status not in (Status.RUNNING, Status.INTERRUPTED)
        commit = (result["model"] or {}).get("revision")
        return status in FINISHED and commit in (None, cached_commit(config.model) or commit)

    def _copy(self, earlier: Path) -> Row:
        """Let the row of `earlier` stand for this point too, and run nothing."""
        source = read_point(earlier)
        assert source is not None, "_is_done has read it"
        row = source.row
        if row["status"] == Status.RUNNING:  # its sweep was killed right after the job's last word
            row = row_of(earlier, row["overrides"], None)
        row = row | {"resumed_from": earlier.name}
        if source.run != self.token:
            self.sweep.put(earlier, replace(source, run=self.token, row=row))
            return self.sweep.placed(row)
        there = read_point(self.job_dir)  # an equal point of this very start
        if there is None or (there.key == self.key and self.job_dir != earlier):
            self._put(row | {"job": self.job_dir.name, "overrides": self.task.overrides})
        return self.sweep.placed(row)

    def _take_folder(self, earlier: Path | None) -> None:
        """Run where the point ran before; and leave alone what another point, or a newer version, recorded there."""
        if earlier is not None and earlier.is_dir() and not is_newer(earlier):
            self.job_dir = earlier
            return
        there = read_point(self.job_dir)
        if (there is not None and there.key != self.key) or is_newer(self.job_dir):
            self.job_dir = self.job_dir.with_name(f"{self.job_dir.name}-{(self.key or self.token)[:8]}")
            self.job_dir.mkdir(exist_ok=True)

    def _measure(self, config: Config) -> Row:
        self.started_s = time.monotonic()
        try:
            JobRecord(self.job_dir)
            self.has_begun = True
            (self.job_dir / CONFIG_FILE).write_text(self._configuration(), encoding="utf-8")
            self._put(row_of(self.job_dir, self.task.overrides, None))
            run_isolated(self.job_dir, config.job.timeout_s, self.task.environment, config.job.max_memory_mib)
        except Exception as error:
            record_error(self.job_dir, Status.FAILED, error)
        return self._end()

    def _configuration(self) -> str:
        """Return the YAML, with the folder in which it really runs."""
        from omegaconf import OmegaConf

        assert isinstance(self.task.configuration, str), "_read has loaded it"
        if self.job_dir == self.task.job_dir:
            return self.task.configuration
        moved = OmegaConf.create(self.task.configuration)
        OmegaConf.update(moved, "output_dir", str(self.job_dir))
        return OmegaConf.to_yaml(moved)

    def _refuse(self, error: ConfigError) -> Row:
        if self.key is None:
            self._take_folder(None)
        JobRecord(self.job_dir)
        record_error(self.job_dir, Status.INVALID_CONFIG, error)
        return self._end()

    def _skip(self, reason: str) -> Row:
        there = read_point(self.job_dir)
        if there is not None:  # what an earlier start measured stays
            return self.sweep.placed(there.row)
        error = {"kind": "Skipped", "message": reason, "traceback": None}
        JobRecord(self.job_dir).update(status=Status.SKIPPED, error=error)
        return self._end()

    def _end(self) -> Row:
        row = row_of(self.job_dir, self.task.overrides, time.monotonic() - self.started_s)
        return self._put(row | {"config_hash": row["config_hash"] or self.key})

    def _put(self, row: Row) -> Row:
        job_dir = self.sweep.folder / row["job"]
        self.sweep.put(job_dir, Point(self.task.number, self.key, self.token, row))
        return self.sweep.placed(row)


def settle_lost(sweep: SweepFolder) -> None:
    """Give a final row to each job whose process, or whose machine, went away with the one that watched it."""
    for lost in sweep.points():
        if lost.row["status"] != Status.RUNNING or lost.key is None:
            continue
        with sweep.claim(lost.key, wait_s=0.0) as claim:
            if not claim.is_held:
                continue  # it runs, or this file system cannot say
            job_dir = sweep.folder / lost.row["job"]
            conclude(job_dir, Status.INTERRUPTED, "the process that ran this job is gone, or its machine")
            sweep.put(job_dir, replace(lost, row=row_of(job_dir, lost.row["overrides"], None)))


def record_error(job_dir: Path, status: Status, error: Exception) -> None:
    """Record how a job ended that no process of its own could record; a ConfigError needs no traceback."""
    trace = None if isinstance(error, ConfigError) else "".join(traceback.format_exception(error))
    details = {"kind": type(error).__name__, "message": str(error), "traceback": trace}
    JobRecord.attach(job_dir).update(status=status, error=details)
    log_failure(job_dir)
