"""A sweep on a real Slurm of one node, which `make slurm` starts: whatever happens to a job, it has its row."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
#: What each point sets, beside what all share; Slurm gives the two GPUs, and so starts two at once, in this order.
POINTS = {
    "passes": "{seed: 1, workload: {max_requests: 4}}",
    "fails": "{seed: 2, capture: {policy: max_only, max_size: 2, allow_gap: true}, runner: {above_max: error}}",
    "dies_hard": "{seed: 3, workload: {max_requests: 100000}, job: {timeout_s: 60}}",
    "is_cancelled": "{seed: 4, workload: {max_requests: 100000}, job: {timeout_s: 60}}",
    "runs_out_of_time": "{seed: 5, workload: {max_requests: 100000}, job: {timeout_s: 60}}",
    "never_begins": "seed: 6",
}
SHARED = [
    "experiment=quick", "measure=none", "parity.enabled=false", "tracking=disabled", "device=cpu",
]  # fmt: skip


@pytest.fixture(scope="module")
def slurm() -> Iterator[None]:
    """The Slurm of scripts/slurm.sh; no other is ever given a job."""
    conf = Path("/etc/slurm/slurm.conf")
    if not conf.exists() or "scripts/slurm.sh" not in conf.read_text().partition("\n")[0]:
        pytest.skip("no Slurm for tests on this machine: make slurm installs and starts one (Debian, root)")
    if subprocess.run(["sinfo"], capture_output=True, check=False).returncode != 0:
        pytest.skip("the Slurm for tests does not run: make slurm starts it")
    yield


def until(condition: Callable[[], bool], sweep: subprocess.Popen[str]) -> None:
    """Wait for what jobs do, while their sweep runs."""
    while not condition():
        assert sweep.poll() is None, sweep.communicate()
        time.sleep(0.1)


def runs(job_dir: Path) -> bool:
    return (job_dir / "result.json").exists()


def task_process(sweep_dir: Path, number: int) -> int:
    """The process, below `srun`, of a Slurm job of the sweep."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended just now
            command = (entry / "cmdline").read_bytes().decode()
            variables = (entry / "environ").read_bytes().split(b"\0")
            is_task = f"{sweep_dir}/.submitit" in command and not command.startswith("srun")
            if is_task and f"SLURM_ARRAY_TASK_ID={number}".encode() in variables:
                return int(entry.name)
    raise AssertionError(f"job {number} has no process")


@pytest.mark.slurm
def test_each_job_of_a_sweep_on_slurm_has_a_row_however_it_ends(slurm: None, tmp_path: Path) -> None:
    (tmp_path / "conf/point").mkdir(parents=True)
    for name, text in POINTS.items():
        (tmp_path / f"conf/point/{name}.yaml").write_text(f"# @package _global_\n{text}\n")
    sweep_dir = tmp_path / "sweep"
    sweep = subprocess.Popen(
        [sys.executable, "-m", "harness", "-m", "--config-dir", str(tmp_path / "conf"), *SHARED,
         f"+point={','.join(POINTS)}", f"output_dir={sweep_dir}",
         "hydra/launcher=submitit_slurm", "hydra.launcher.cpus_per_task=1"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until(lambda: (sweep_dir / ".submitit").is_dir() and runs(sweep_dir / "0"), sweep)
    array = min(int(folder.name) for folder in (sweep_dir / ".submitit").iterdir() if folder.name.isdigit())
    subprocess.run(["scancel", f"{array}_5"], check=True)
    until(lambda: runs(sweep_dir / "2"), sweep)
    os.kill(task_process(sweep_dir, 2), signal.SIGKILL)
    until(lambda: runs(sweep_dir / "3"), sweep)
    subprocess.run(["scancel", f"{array}_3"], check=True)
    until(lambda: runs(sweep_dir / "4"), sweep)
    # What Slurm sends `signal_delay_s` before the end of a job's time.
    subprocess.run(["scancel", "--signal=USR2", f"{array}_4"], check=True)
    printed, errors = sweep.communicate(timeout=120)
    assert sweep.returncode == 1, errors
    with (sweep_dir / "sweep.csv").open() as file:
        rows = {
            row["overrides"].partition("+point=")[2].partition(" ")[0]: row for row in csv.DictReader(file)
        }
    assert {name: row["status"] for name, row in rows.items()} == {
        "passes": "ok",
        "fails": "failed",
        "dies_hard": "killed",
        "is_cancelled": "interrupted",
        "runs_out_of_time": "timeout",
        "never_begins": "interrupted",
    }, printed + errors
    assert rows["fails"]["error_kind"] == "NoUsableGraphError"
    assert rows["dies_hard"]["error_kind"] == "SIGKILL"
    assert "hydra.launcher.timeout_min" in rows["runs_out_of_time"]["error_message"]
    assert "5 job(s) did not end ok" in errors
    environment = json.loads((sweep_dir / "0/result.json").read_text())["environment"]
    assert environment["cuda_visible_devices"] in ("0", "1")
