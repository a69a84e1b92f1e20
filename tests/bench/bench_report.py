"""Time and size of the report of a sweep of 200 jobs: under 10 s and under 8 MB.

python -m pytest tests/bench/bench_report.py -s
"""

from __future__ import annotations

import time
from pathlib import Path

from harness.report.command import main
from tests.harness.report.sweep_folder import write_sweep


def test_the_report_of_200_jobs_is_made_in_seconds_and_stays_small(tmp_path: Path) -> None:
    write_sweep(tmp_path, num_jobs=200, failed=(5, 50), num_steps=2000)
    started = time.perf_counter()
    main([str(tmp_path)])
    seconds, size = time.perf_counter() - started, (tmp_path / "report.html").stat().st_size
    print(f"\n200 jobs: {seconds:.1f} s, {size / 1e6:.2f} MB")
    assert seconds < 10
    assert size < 8e6
