"""`sweep.dry_run=true`: says what each job would be, and which are refused, and runs none."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from harness.config_hash import expected_hash
from harness.errors import ConfigError, RecordError
from harness.estimate import Estimate, estimate
from harness.exit_codes import INVALID, OK
from harness.point import PointTask
from harness.record import Status
from harness.record_reader import read_result
from harness.schema import check, load_config
from harness.sweep import FINISHED, SweepFolder
from harness.terminal import say


@dataclass
class DryRun:
    """The points of a command line, each looked at and none run."""

    #: The sweep to go on with, whose finished points would not run again.
    sweep: SweepFolder | None = None
    num_points: int = 0
    num_refused: int = 0
    num_finished: int = 0
    estimates: list[Estimate] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)

    def look_at(self, task: PointTask) -> None:
        """Print what the point would be."""
        self.num_points += 1
        say(f"[{task.number}] {task.overrides or 'as configured'}")
        say(f"     {self._verdict(task)}")

    def _verdict(self, task: PointTask) -> str:
        try:
            if isinstance(task.configuration, ConfigError):
                raise task.configuration
            config = load_config(task.configuration)
            check(config)
        except ConfigError as error:
            self.num_refused += 1
            return f"refused: {error}"
        key = expected_hash(config)
        if key in self.keys:
            return "equal to a point above: would not run again"
        self.keys.add(key)
        if self._is_finished(key):
            self.num_finished += 1
            return "finished: would not run again"
        found = estimate(config)
        self.estimates.append(found)
        return _line(found)

    def _is_finished(self, key: str) -> bool:
        """Return whether the sweep has a job of that hash which ended, and whose record can be read."""
        if self.sweep is None:
            return False
        try:
            return any(
                Status(read_result(self.sweep.folder / point.row["job"])["status"]) in FINISHED
                for point in self.sweep.points()
                if point.key == key and Status(point.row["status"]) in FINISHED
            )
        except RecordError as error:
            say(f"     {error}")
            return False

    def report(self) -> int:
        """Print the sums and what they rest on; 2 if a point is refused."""
        equal = self.num_points - self.num_refused - self.num_finished - len(self.estimates)
        num_graphs = sum(len(found.capture_sizes) for found in self.estimates)
        say(
            f"{self.num_points} point(s): {len(self.estimates)} would run, {self.num_finished} finished, {equal} equal, "
            f"{self.num_refused} refused; {num_graphs} graphs to capture; nothing was run"
        )
        known = [found.seconds for found in self.estimates if found.seconds is not None]
        if self.estimates and len(known) == len(self.estimates):
            say(f"estimated seconds in all: {sum(known):.0f}, one job at a time")
        elif self.estimates:
            say(f"estimated seconds in all: unknown{self._past()}")
        for ground in sorted({f"seconds: {found.seconds_ground}" for found in self.estimates}):
            say(f"  {ground}")
        for ground in sorted({f"memory: {found.memory_ground}" for found in self.estimates}):
            say(f"  {ground}")
        say(
            "  a job still checks the model's family, and its budget against what is free, before it loads weights"
        )
        return INVALID if self.num_refused else OK

    def _past(self) -> str:
        rows: list[dict[str, Any]] = [] if self.sweep is None else self.sweep.rows()
        spent = [row["duration_s"] for row in rows if row["status"] == Status.OK and row["duration_s"]]
        if not spent:
            return ""
        return f"; the {len(spent)} finished job(s) of this sweep took {statistics.median(spent):.0f} s each (median)"


def _line(found: Estimate) -> str:
    sizes = ",".join(map(str, _thinned(found.capture_sizes)))
    graphs = f"{len(found.capture_sizes)} graphs ({sizes})" if sizes else "no graphs"
    seconds = "unknown" if found.seconds is None else f"{found.seconds:.0f}"
    memory = "unknown" if found.memory_mib is None else f"{found.memory_mib:,.0f} MiB"
    return f"{graphs}; seconds: {seconds}; memory: {memory}"


def _thinned(sizes: tuple[int, ...], shown: int = 8) -> list[object]:
    return list(sizes) if len(sizes) <= shown else [*sizes[: shown - 1], "…", sizes[-1]]
