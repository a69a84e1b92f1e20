"""A sweep in which jobs die in six ways has a row for each, says what to do, and loses nothing of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.remedies import remedy
from tests.bench.bench_sweep import LONG_FAULTS, SHORT_FAULTS, PlantedSweep, run_planted_sweep


@pytest.mark.parametrize(
    ("num_jobs", "faults"),
    [(24, SHORT_FAULTS), pytest.param(200, LONG_FAULTS, marks=[pytest.mark.long, pytest.mark.timeout(1500)])],
)
def test_every_planted_fault_is_a_row_of_its_kind(
    num_jobs: int, faults: tuple[str, ...], tmp_path: Path
) -> None:
    # A quarter of 24: each kind once.
    sweep = run_planted_sweep(tmp_path, num_jobs, faults, share=0.25 if num_jobs < 100 else 0.2)
    assert sweep.exit_code == 1, sweep.printed
    assert [row["job"] for row in sweep.rows] == [str(number) for number in range(num_jobs)]
    assert sweep.wrong_rows() == []
    assert set(sweep.planted.values()) == set(faults)
    check_report(sweep)


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
