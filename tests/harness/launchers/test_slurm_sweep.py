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
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
#: What each point sets, beside what all share; Slurm gives the two GPUs, and so starts two at once, in this order.
POINTS = {
    "passes": "{seed: 1, workload: {max_requests: 4}}",
    "fails": "{seed: 2, capture: {policy: max_only, max_size: 2, allow_gap: true}, runner: {above_max: error}}",
    "dies_hard": "{seed: 3, workload: {max_requests: 100000}}",
    "is_cancelled": "{seed: 4, workload: {max_requests: 100000}}",
    "never_begins": "seed: 5",
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


def processes(word: str) -> list[int]:
    """The processes, `srun` aside, with `word` on their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = entry.read_bytes().split(b"\0")
        except OSError:  # it ended just now
            continue
        if arguments[0] != b"srun" and any(word.encode() in argument for argument in arguments):
            found.append(int(entry.parent.name))
    return found


def kill_hard(sweep_dir: Path, number: int) -> None:
    """Kill all of a Slurm job's processes but its script: a segmentation fault or the kernel's OOM killer."""
    for pid in processes(f"{sweep_dir}/{number}"):
        os.kill(pid, signal.SIGKILL)
    for pid in processes(f"{sweep_dir}/.submitit"):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"SLURM_ARRAY_TASK_ID={number}".encode() in environment:
            os.kill(pid, signal.SIGKILL)


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
    subprocess.run(["scancel", f"{array}_4"], check=True)
    until(lambda: runs(sweep_dir / "2"), sweep)
    kill_hard(sweep_dir, 2)
    until(lambda: runs(sweep_dir / "3"), sweep)
    subprocess.run(["scancel", f"{array}_3"], check=True)
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
        "never_begins": "interrupted",
    }, printed + errors
    assert rows["fails"]["error_kind"] == "NoUsableGraphError"
    assert rows["dies_hard"]["error_kind"] == "SIGKILL"
    assert "4 job(s) did not end ok" in errors
    environment = json.loads((sweep_dir / "0/result.json").read_text())["environment"]
    assert environment["cuda_visible_devices"] in ("0", "1")
