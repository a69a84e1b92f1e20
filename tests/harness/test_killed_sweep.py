"""`sweep.csv` is whole and readable however often, and whenever, a sweep is killed."""

from __future__ import annotations

import csv
import functools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import point
from harness.point import PointTask, run_point, settle_lost
from harness.record import JobRecord, Status
from harness.sweep import SWEEP_COLUMNS, SweepFolder
from tests.harness.tiny import tiny_yaml

NUM_KILLS, NUM_POINTS = 50, 8


@functools.cache
def configuration(seed: int) -> str:
    return tiny_yaml({"seed": seed})


def tasks(folder: Path) -> list[PointTask]:
    for number in range(NUM_POINTS):
        (folder / str(number)).mkdir(parents=True, exist_ok=True)
    return [
        PointTask(folder, folder / str(number), number, f"seed={number}", configuration(number))
        for number in range(NUM_POINTS)
    ]


def run_sweep(folder: Path, points: list[PointTask]) -> None:
    sweep = SweepFolder(folder)
    sweep.open(resume=sweep.is_started())
    for task in points:
        run_point(task)


def in_a_process(work: Callable[[], None], killed_after_s: float | None) -> int:
    """Do `work` in a process that the kernel ends after so many seconds; return how it ended."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process wherever it is, as SIGKILL does
            signal.setitimer(signal.ITIMER_REAL, killed_after_s or 0.0)
            work()
        finally:
            os._exit(1 if sys.exc_info()[0] else 0)
    return os.waitpid(pid, 0)[1]


@pytest.fixture
def short_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that record two things and end, without what takes longest: to read YAML, to wait for the disk."""

    def run(job_dir: Path, *limits: object) -> Status:
        record = JobRecord(job_dir)
        record.append("capture", {"capture_size": 4})
        record.update(status=Status.OK)
        return Status.OK

    monkeypatch.setattr(point, "run_isolated", run)
    monkeypatch.setattr(os, "fsync", lambda file: None)  # a kill loses nothing that a power cut would
    monkeypatch.setattr(point, "load_config", functools.cache(point.load_config))


def test_a_sweep_killed_at_fifty_moments_loses_no_row(tmp_path: Path, short_jobs: None) -> None:
    rng = random.Random(0)
    for name in ("first", "timed"):
        points = tasks(tmp_path / name)
        begun_s = time.perf_counter()
        run_sweep(tmp_path / name, points)
        spent_s = time.perf_counter() - begun_s
    num_killed = num_sweeps = 0
    while num_killed < NUM_KILLS:
        folder, num_sweeps = tmp_path / str(num_sweeps), num_sweeps + 1
        points = tasks(folder)
        finished: set[str] = set()
        while len(finished) < NUM_POINTS and num_killed < NUM_KILLS:
            ended = in_a_process(lambda: run_sweep(folder, points), rng.uniform(0.0, spent_s / 2))  # noqa: B023
            assert ended in (0, signal.SIGALRM)
            num_killed += ended != 0
            rows = read_table(folder)
            still_finished = {row["job"] for row in rows if row["status"] == "ok"}
            assert finished <= still_finished and len({row["job"] for row in rows}) == len(rows)
            finished = still_finished
        assert in_a_process(lambda: run_sweep(folder, points), None) == 0  # noqa: B023
        settle_lost(SweepFolder(folder))
        ends = [(row["job"], row["status"]) for row in read_table(folder)]
        assert ends == [(str(number), "ok") for number in range(NUM_POINTS)]


def read_table(folder: Path) -> list[dict[str, str]]:
    """Return the rows of sweep.csv, which is as whole as the header says; none before the sweep's first moment."""
    table = folder / "sweep.csv"
    if not table.exists():
        return []
    text = table.read_text()
    assert text.endswith("\n")
    rows = list(csv.DictReader(text.splitlines()))
    assert text.splitlines()[0] == ",".join(SWEEP_COLUMNS)
    assert all(None not in row and None not in row.values() for row in rows)
    assert {row["status"] for row in rows} <= {"ok", "running", "interrupted"}
    return rows
