"""Each launcher is a choice that composes, runs its jobs where it says, and refuses what it cannot do by name."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness import extras, point
from harness.__main__ import main
from harness.compose import compose, group_choices
from harness.record import JobRecord, Status

#: A sweep of one job that ends before it would load anything.
REFUSED = ["-m", "capture.max_size=-1", "tracking=disabled"]


@pytest.mark.parametrize("choice", group_choices("hydra/launcher"))
def test_every_launcher_composes(choice: str) -> None:
    compose([f"hydra/launcher={choice}"])


@pytest.mark.parametrize("choice", ["basic", "joblib", "submitit_local"])
def test_a_point_that_cannot_run_is_a_row_with_every_launcher(
    choice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*REFUSED, f"hydra/launcher={choice}", f"output_dir={tmp_path}/sweep"]
    assert main(arguments) == 1
    assert "invalid_config" in (tmp_path / "sweep/sweep.csv").read_text().splitlines()[1]
    assert "capture.max_size=-1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hydra.launcher.n_jobs=0", "hydra.launcher.n_jobs=0: give a whole number, 1 or more"),
        ("hydra.launcher.n_jobs=many", "hydra.launcher.n_jobs=many: give a whole number"),
        ("hydra.launcher.gpus=[0,0]", "hydra.launcher.gpus=[0,0]: name each GPU once"),
        ("hydra.launcher.gpu=[0]", "unknown key"),
    ],
)
@pytest.mark.parametrize("choice", ["joblib", "submitit_local"])
def test_values_that_cannot_be_meant_are_refused_before_a_job(
    choice: str, override: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*REFUSED, f"hydra/launcher={choice}", override, f"output_dir={tmp_path}/sweep"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "sweep/0").exists()


@pytest.mark.parametrize(
    ("override", "package"),
    [
        ("hydra/launcher=joblib", "joblib"),
        ("hydra/launcher=submitit_local", "submitit"),
        ("hydra/launcher=submitit_slurm", "submitit"),
        ("hydra/sweeper=optuna", "optuna"),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_its_extra(
    override: str,
    package: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == package else find_spec(name))
    assert main([*REFUSED, override, f"output_dir={tmp_path}/sweep"]) == 2
    expected = f"{override}: needs the package {package}: pip install 'cudagraph-harness[sweep]'"
    assert expected in capsys.readouterr().err


def test_slurm_without_slurm_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda command: None)
    assert main([*REFUSED, "hydra/launcher=submitit_slurm", f"output_dir={tmp_path}/sweep"]) == 2
    assert "there is no sbatch here" in capsys.readouterr().err


def test_no_two_jobs_that_run_share_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []

    def run(job_dir: Path, timeout_s: float | None, environment: Mapping[str, str], *rest: object) -> Status:
        """Stand for the job's process: it finds the mark of another job that has its GPU now."""
        device = environment["CUDA_VISIBLE_DEVICES"]
        mark = tmp_path / f"in_use_{device}"
        mark.touch(exist_ok=False)
        used.append(device)
        if len(used) <= 3:  # the first three wait for each other: all GPUs are in use at once
            all_begun.wait()
        mark.unlink()
        JobRecord.attach(job_dir).update(status=Status.OK)
        return Status.OK

    all_begun = threading.Barrier(3, timeout=60)
    monkeypatch.setattr(point, "run_isolated", run)
    arguments = [
        "-m", f"seed={','.join(map(str, range(9)))}", "tracking=disabled", "device=cpu",
        "hydra/launcher=joblib", "hydra.launcher.gpus=[0,1,2]", f"output_dir={tmp_path}/sweep",
    ]  # fmt: skip
    assert main(arguments) == 0
    assert len(used) == 9
    assert set(used[:3]) == {"0", "1", "2"}
