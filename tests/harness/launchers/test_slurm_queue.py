"""What Slurm says of a job, read: whether it may still run, and how it ended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.launchers.endings import read_ending
from harness.launchers.slurm_queue import GONE, SlurmSilentError, SlurmState, ask_squeue
from harness.record import Status

#: As Slurm 22.05 prints it for jobs that exited with 7, were killed by SIGKILL, passed, were cancelled, wait.
PRINTED = """\
1_5                                                             FAILED                          N/A
1_4                                                             PENDING                         0
1_3                                                             CANCELLED                       15
1_2                                                             COMPLETED                       0
1_1                                                             FAILED                          35072
1_0                                                             FAILED                          1792
"""


def squeue(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = folder / "squeue"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_each_job_of_an_array_has_its_state_and_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "printed").write_text(PRINTED)
    squeue(tmp_path, f"cat {tmp_path}/printed", monkeypatch)
    assert ask_squeue("1") == {
        "1_5": SlurmState("FAILED"),
        "1_4": SlurmState("PENDING"),
        "1_3": SlurmState("CANCELLED", -15),
        "1_2": SlurmState("COMPLETED", 0),
        "1_1": SlurmState("FAILED", -9),
        "1_0": SlurmState("FAILED", 7),
    }


def test_jobs_that_slurm_has_forgotten_are_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue(tmp_path, "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", monkeypatch)
    assert ask_squeue("1") == {}


def test_a_controller_that_does_not_answer_ends_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue(tmp_path, "echo 'Unable to contact slurm controller' >&2; exit 1", monkeypatch)
    with pytest.raises(SlurmSilentError, match="Unable to contact"):
        ask_squeue("1")


@pytest.mark.parametrize("name", ["PENDING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED", "CONFIGURING"])
def test_a_job_that_may_still_run_is_not_finished(name: str) -> None:
    assert not SlurmState(name).is_finished


@pytest.mark.parametrize(
    ("state", "status", "reason"),
    [
        (SlurmState("FAILED", 7), Status.FAILED, "code 7"),
        (SlurmState("FAILED", -9), Status.KILLED, "SIGKILL"),
        (SlurmState("COMPLETED", 0), Status.FAILED, "code 0"),
        (SlurmState("CANCELLED", -15), Status.INTERRUPTED, "CANCELLED"),
        (SlurmState("PREEMPTED"), Status.INTERRUPTED, "PREEMPTED"),
        (SlurmState("TIMEOUT", 0), Status.TIMEOUT, "timeout_min"),
        (SlurmState("NODE_FAIL"), Status.KILLED, "NODE_FAIL"),
        (SlurmState("OUT_OF_MEMORY", -9), Status.KILLED, "OUT_OF_MEMORY"),
        (GONE, Status.KILLED, "GONE"),
    ],
)
def test_the_end_of_a_job_without_a_status_gives_it_one(
    state: SlurmState, status: Status, reason: str
) -> None:
    assert state.is_finished
    read_status, read_reason = read_ending(state)
    assert read_status is status
    assert reason in read_reason
