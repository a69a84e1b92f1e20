"""A sweep on a GPU: forked jobs capture real graphs, and a CUDA fault ends one row."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
JOB = (
    "device=cuda", "attention=torch", "capture=powers_of_two", "runner.max_batch_size=4", "measure=quick", "workload.max_requests=4",
    "tracking=disabled",
)  # fmt: skip


def test_forked_jobs_use_cuda_and_a_fault_ends_one_of_them(tmp_path: Path) -> None:
    folders = [str(ROOT / "tests" / "faults"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        "PYTHONPATH": os.pathsep.join(folders),
        "HARNESS_TEST_FAULTS": json.dumps({"1": "cuda", "3": "kill"}),
    }
    ran = subprocess.run(
        [sys.executable, "-m", "harness", "-m", "seed=0,1,2,3,4", *JOB, f"output_dir={tmp_path}/sweep"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1, ran.stderr
    with (tmp_path / "sweep" / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["ok", "failed", "ok", "killed", "ok"], ran.stderr
    assert [row["graph_backend"] for row in rows if row["status"] == "ok"] == ["cuda"] * 3
    assert "CUDA" in rows[1]["error_message"]
    assert "a CUDA fault: run the point alone with CUDA_LAUNCH_BLOCKING=1" in ran.stderr
    assert "Traceback" in (tmp_path / "sweep" / "1" / "job.log").read_text()
    for job in "0", "2", "4":
        assert "without the fork server" not in (tmp_path / "sweep" / job / "job.log").read_text()
        result = json.loads((tmp_path / "sweep" / job / "result.json").read_text())
        assert (
            result["config_hash"] == json.loads((tmp_path / "sweep" / job / "point.json").read_text())["key"]
        )
