"""A sweep in which jobs die in six ways has a row for each, says what to do, and loses nothing of the others."""

from __future__ import annotations

import csv
import signal
import time
from pathlib import Path

import pytest

from harness.remedies import remedy
from tests.bench.bench_sweep import LONG_FAULTS, SHORT_FAULTS, PlantedSweep, run_planted_sweep, start_sweep


@pytest.mark.parametrize(
    ("num_jobs", "faults"),
    [(12, SHORT_FAULTS), pytest.param(200, LONG_FAULTS, marks=[pytest.mark.long, pytest.mark.timeout(1500)])],
)
def test_every_planted_fault_is_a_row_of_its_kind(
    num_jobs: int, faults: tuple[str, ...], tmp_path: Path
) -> None:
    # A half of 12: each kind once.
    sweep = run_planted_sweep(tmp_path, num_jobs, faults, share=0.5 if num_jobs < 100 else 0.2)
    assert sweep.exit_code == 1, sweep.printed
    assert [row["job"] for row in sweep.rows] == [str(number) for number in range(num_jobs)]
    assert sweep.wrong_rows() == []
    assert set(sweep.planted.values()) == set(faults)
    check_report(sweep)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_sweep_that_is_ended_writes_the_row_of_its_job_first(
    number: signal.Signals, tmp_path: Path
) -> None:
    sweep = start_sweep(tmp_path, [0, 1], {"0": "hang"})
    while not (tmp_path / "sweep" / "0" / "capture.csv").exists():
        assert sweep.poll() is None
        time.sleep(0.01)
    sweep.send_signal(number)
    _, printed = sweep.communicate()
    assert sweep.returncode == 130
    with (tmp_path / "sweep" / "sweep.csv").open(newline="") as file:
        assert [(row["job"], row["status"]) for row in csv.DictReader(file)] == [("0", "interrupted")]
    assert "remedy: the same line with sweep.resume=true runs it again" in printed


def check_report(sweep: PlantedSweep) -> None:
    """Each failed row is in the table with its remedy, and each of its folders has a log and what was measured."""
    assert f"{len(sweep.planted)} job(s) did not end ok" in sweep.printed
    for row in sweep.rows:
        job_dir = Path(row["job_dir"])
        assert (job_dir / "job.log").exists()
        assert (job_dir / "capture.csv").exists()
        if row["job"] in sweep.planted:
            assert row["error_message"].splitlines()[0] in sweep.printed
            assert f"remedy: {remedy(row)}" in sweep.printed
    crashed = next(row for row in sweep.rows if row["error_kind"] == "RuntimeError")
    assert "planted" in (Path(crashed["job_dir"]) / "job.log").read_text()
