"""A point whose process is gone gets its row from whoever watched it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness import point
from harness.errors import ConfigError
from harness.launchers.endings import conclude_job
from harness.launchers.slurm_queue import GONE, SlurmState
from harness.point import PointTask, conclude_point, row_of_point, run_point
from harness.record import JobRecord, Status
from harness.sweep import Point, SweepFolder, row_of
from tests.harness.tiny import tiny_yaml


@pytest.fixture
def task(tmp_path: Path) -> PointTask:
    """A point of a sweep that began, which is refused when it runs."""
    sweep = tmp_path / "sweep"
    SweepFolder(sweep).open(resume=False)
    (sweep / "0").mkdir()
    refused = ConfigError("capture.max_size", -1, "must be at least 1")
    return PointTask(sweep, sweep / "0", 0, "capture.max_size=-1", refused)


def begin(task: PointTask) -> JobRecord:
    """Leave behind what a point does that was killed while it ran."""
    record, sweep = JobRecord(task.job_dir), SweepFolder(task.sweep_dir)
    sweep.put(task.job_dir, Point(0, "key", sweep.run, row_of(task.job_dir, task.overrides, None)))
    return record


def test_a_point_that_died_gets_the_status_of_its_job(task: PointTask) -> None:
    begin(task)
    row = conclude_job(task, SlurmState("FAILED", -9))
    assert (row["status"], row["error_kind"]) == ("killed", "SIGKILL")
    assert [row["status"] for row in SweepFolder(task.sweep_dir).rows()] == ["killed"]


def test_a_point_that_recorded_its_end_keeps_it(task: PointTask) -> None:
    begin(task).update(status=Status.OK)
    assert conclude_job(task, SlurmState("FAILED", 1))["status"] == "ok"


def test_a_point_that_never_began_has_a_row_too(task: PointTask) -> None:
    assert row_of_point(task) is None
    row = conclude_job(task, SlurmState("NODE_FAIL"))
    assert (row["status"], row["error_kind"]) == ("killed", "NODE_FAIL")


def test_what_slurm_forgot_before_it_began_was_cancelled(task: PointTask) -> None:
    assert conclude_job(task, GONE)["status"] == "interrupted"


def test_what_slurm_forgot_while_it_ran_was_killed(task: PointTask) -> None:
    begin(task)
    assert conclude_job(task, GONE)["status"] == "killed"


@pytest.mark.parametrize("status", [Status.INTERRUPTED, Status.TIMEOUT])
def test_who_sent_the_signal_says_what_it_meant(task: PointTask, status: Status) -> None:
    error = {"kind": "SIGTERM", "message": "the job was ended by SIGTERM", "traceback": None}
    begin(task).update(status=Status.KILLED, error=error)
    row = conclude_point(task, status, "the time is up")
    assert (row["status"], row["error_message"]) == (str(status), "the time is up")


def test_a_cancelled_job_that_had_failed_before_stays_failed(task: PointTask) -> None:
    run_point(task)
    assert conclude_job(task, SlurmState("CANCELLED", -15))["status"] == "invalid_config"


def test_a_point_that_a_cluster_puts_back_in_the_queue_runs_again(
    task: PointTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [Status.INTERRUPTED, Status.OK]
    monkeypatch.setattr(
        point, "run_isolated", lambda job_dir, *rest: JobRecord(job_dir).update(status=ends.pop(0))
    )
    runs = replace(task, configuration=tiny_yaml({"device": "cpu"}))
    rows = [run_point(runs) for _ in range(3)]
    assert [row["status"] for row in rows] == ["interrupted", "ok", "ok"]
    assert ends == []
