"""A point of a sweep: run once, found again on resume, in whichever process, and never over another's record."""

from __future__ import annotations

import csv
import pickle
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness import point
from harness.app import Task
from harness.errors import ConfigError
from harness.point import PointTask, run_point, settle_lost
from harness.record import SCHEMA_VERSION, JobRecord, Status
from harness.record_reader import read_result
from harness.sweep import SweepFolder
from tests.harness.tiny import tiny_yaml

Jobs = list[str]


@pytest.fixture
def ends() -> dict[str, Status]:
    """How the job of a folder ends; `ok` where it says nothing."""
    return {}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, ends: dict[str, Status]) -> Jobs:
    """Names of the folders in which a job ran; a stand-in for its process."""
    names: Jobs = []

    def run(job_dir: Path, *limits: object) -> Status:
        names.append(job_dir.name)
        status = ends.get(job_dir.name, Status.OK)
        if status is Status.INTERRUPTED:
            raise KeyboardInterrupt
        JobRecord(job_dir).update(status=status)
        return status

    monkeypatch.setattr(point, "run_isolated", run)
    return names


def task(sweep: SweepFolder, number: int, seed: int, **changes: object) -> PointTask:
    job_dir = sweep.folder / str(number)
    job_dir.mkdir(exist_ok=True)
    configuration = tiny_yaml({"seed": seed, "output_dir": str(job_dir)})
    return replace(PointTask(sweep.folder, job_dir, number, f"seed={seed}", configuration), **changes)  # type: ignore[arg-type]


def table(sweep: SweepFolder) -> list[tuple[str, str, str]]:
    """(job, status, name of the folder it was found in) of each row of sweep.csv."""
    with (sweep.folder / "sweep.csv").open() as file:
        return [(row["job"], row["status"], Path(row["resumed_from"]).name) for row in csv.DictReader(file)]


@pytest.fixture
def sweep(tmp_path: Path) -> SweepFolder:
    folder = SweepFolder(tmp_path / "sweep")
    folder.open(resume=False)
    return folder


def test_equal_points_of_a_sweep_run_once(sweep: SweepFolder, ran: Jobs, ends: dict[str, Status]) -> None:
    ends["0"] = Status.FAILED
    for number, seed in enumerate((7, 8, 7)):
        run_point(task(sweep, number, seed))
    assert ran == ["0", "1"]
    assert table(sweep) == [("0", "failed", ""), ("1", "ok", ""), ("2", "failed", "0")]


@pytest.mark.parametrize("status", ["ok", "parity_failed", "capture_oom", "invalid_config"])
def test_what_is_finished_is_not_run_again(
    status: str, sweep: SweepFolder, ran: Jobs, ends: dict[str, Status]
) -> None:
    ends["0"] = Status(status)
    run_point(task(sweep, 0, 7))
    sweep.open(resume=True)
    row = run_point(task(sweep, 0, 7))
    assert ran == ["0"]
    assert (row["status"], row["resumed_from"]) == (status, str(sweep.folder / "0"))
    assert table(sweep) == [("0", status, "0")]


@pytest.mark.parametrize("status", ["failed", "timeout", "killed", "skipped"])
def test_what_may_end_otherwise_is_run_again(
    status: str, sweep: SweepFolder, ran: Jobs, ends: dict[str, Status]
) -> None:
    ends["0"] = Status(status)
    run_point(task(sweep, 0, 7))
    sweep.open(resume=True)
    ends["0"] = Status.OK
    run_point(task(sweep, 0, 7))
    assert ran == ["0", "0"]
    assert table(sweep) == [("0", "ok", "")]


def test_an_interrupted_point_has_a_row_and_runs_again(
    sweep: SweepFolder, ran: Jobs, ends: dict[str, Status]
) -> None:
    ends["0"] = Status.INTERRUPTED
    with pytest.raises(KeyboardInterrupt):
        run_point(task(sweep, 0, 7))
    assert table(sweep) == [("0", "interrupted", "")]
    sweep.open(resume=True)
    ends.clear()
    run_point(task(sweep, 0, 7))
    assert table(sweep) == [("0", "ok", "")]


def test_a_point_cancelled_before_it_begins_changes_no_row(
    sweep: SweepFolder, ran: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_point(task(sweep, 0, 7))
    sweep.open(resume=True)

    def cancel(config: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(point, "expected_hash", cancel)
    with pytest.raises(KeyboardInterrupt):
        run_point(task(sweep, 0, 8))
    assert table(sweep) == [("0", "ok", "")]


def test_a_failure_that_is_kept_does_not_stop_a_resumed_sweep(
    sweep: SweepFolder, ran: Jobs, ends: dict[str, Status]
) -> None:
    ends["0"] = Status.PARITY_FAILED
    run_point(task(sweep, 0, 7))
    sweep.open(resume=True)
    for number, seed in enumerate((7, 8)):
        run_point(task(sweep, number, seed, stops_on_failure=True))
    assert table(sweep) == [("0", "parity_failed", "0"), ("1", "ok", "")]


def test_other_points_on_resume_leave_the_records_alone(sweep: SweepFolder, ran: Jobs) -> None:
    for number, seed in enumerate((7, 8)):
        run_point(task(sweep, number, seed))
    sweep.open(resume=True)
    for number, seed in enumerate((6, 7, 8, 9)):
        run_point(task(sweep, number, seed))
    moved = ran[2]
    assert moved.startswith("0-") and ran == ["0", "1", moved, "3"]
    assert sorted(table(sweep)) == [("0", "ok", "0"), (moved, "ok", ""), ("1", "ok", "1"), ("3", "ok", "")]
    assert read_result(sweep.folder / moved)["status"] == "ok"
    assert str(sweep.folder / moved) in (sweep.folder / moved / "config.yaml").read_text()


def test_what_a_newer_version_recorded_stays_and_its_point_runs_elsewhere(
    sweep: SweepFolder, ran: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    run_point(task(sweep, 0, 7))
    recorded = sweep.folder / "0" / "result.json"
    newer = recorded.read_text().replace(f'"schema_version": "{SCHEMA_VERSION}"', '"schema_version": "99.0"')
    recorded.write_text(newer)
    sweep.open(resume=True)
    run_point(task(sweep, 0, 7))
    assert "[0] runs again: " in capsys.readouterr().err
    assert recorded.read_text() == newer
    moved = ran[1]
    assert moved.startswith("0-")
    assert table(sweep) == [("0", "ok", ""), (moved, "ok", "")]
    sweep.open(resume=True)
    run_point(task(sweep, 0, 7))
    assert len(ran) == 2


def test_equal_points_in_two_processes_run_once(
    sweep: SweepFolder, ran: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    stand_in: Callable[..., Status] = point.run_isolated

    def run(job_dir: Path, *limits: object) -> Status:
        begun.set()
        may_end.wait(60)
        return stand_in(job_dir)

    monkeypatch.setattr(point, "run_isolated", run)
    threads = [threading.Thread(target=run_point, args=(task(sweep, number, 7),)) for number in range(2)]
    threads[0].start()
    begun.wait(60)
    threads[1].start()
    may_end.set()
    for thread in threads:
        thread.join()
    assert ran == ["0"]
    assert table(sweep) == [("0", "ok", ""), ("1", "ok", "0")]


def test_a_point_that_runs_has_a_row(sweep: SweepFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str, str]] = []
    monkeypatch.setattr(point, "run_isolated", lambda job_dir, *limits: seen.extend(table(sweep)))
    run_point(task(sweep, 0, 7))
    assert seen == [("0", "running", "")]


def test_a_point_that_cannot_run_is_a_row_with_its_hash(sweep: SweepFolder, ran: Jobs) -> None:
    unreadable = replace(task(sweep, 0, 7), configuration=ConfigError("seed", "x", "give a whole number"))
    refused = replace(task(sweep, 1, 7), configuration=tiny_yaml({"seed": -1}))
    rows = [run_point(unreadable), run_point(refused)]
    assert [row["status"] for row in rows] == ["invalid_config", "invalid_config"]
    assert rows[0]["config_hash"] is None
    assert rows[1]["config_hash"] is not None
    assert not ran


def test_after_the_first_failure_points_are_skipped_when_asked_for(
    sweep: SweepFolder, ran: Jobs, ends: dict[str, Status]
) -> None:
    ends["0"] = Status.KILLED
    for number in range(2):
        run_point(task(sweep, number, number, stops_on_failure=True))
    assert table(sweep) == [("0", "killed", ""), ("1", "skipped", "")]


def test_a_folder_takes_one_sweep(sweep: SweepFolder) -> None:
    with pytest.raises(ConfigError, match=r"holds a sweep already: add sweep\.resume=true"):
        SweepFolder(sweep.folder).open(resume=False)


def test_a_sweep_that_began_no_job_leaves_its_name_free(sweep: SweepFolder) -> None:
    sweep.discard()
    assert not sweep.folder.exists()


def test_a_job_whose_process_is_gone_is_interrupted(
    sweep: SweepFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(point, "run_isolated", lambda job_dir, *limits: Status.RUNNING)
    run_point(task(sweep, 0, 7))
    settle_lost(sweep)
    assert table(sweep) == [("0", "interrupted", "")]
    assert "is gone" in read_result(sweep.folder / "0")["error"]["message"]


def test_a_job_that_another_process_runs_is_left_to_it(
    sweep: SweepFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(point, "run_isolated", lambda job_dir, *limits: settle_lost(sweep))
    assert run_point(task(sweep, 0, 7))["status"] == "running"


def test_what_a_launcher_pickles_keeps_nothing_of_this_process(sweep: SweepFolder) -> None:
    sent = Task()
    sent.status = Status.FAILED
    received = pickle.loads(pickle.dumps(sent))
    assert received.status is None
    point_task = task(sweep, 0, 7)
    assert pickle.loads(pickle.dumps(point_task)) == point_task
