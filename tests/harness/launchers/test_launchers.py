"""Each launcher is a choice that composes, runs its jobs where it says, and refuses what it cannot do by name."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness import extras
from harness.__main__ import main
from harness.compose import compose, group_choices

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


def test_two_jobs_at_once_get_a_gpu_each(tmp_path: Path) -> None:
    arguments = [
        "-m", "experiment=quick", "measure=none", "workload=none", "parity.enabled=false", "tracking=disabled",
        "device=cpu", "seed=1,2", "hydra/launcher=joblib", "hydra.launcher.gpus=[0,1]", f"output_dir={tmp_path}/sweep",
    ]  # fmt: skip
    assert main(arguments) == 0
    results = [json.loads((tmp_path / f"sweep/{job}/result.json").read_text()) for job in (0, 1)]
    assert {result["environment"]["cuda_visible_devices"] for result in results} == {"0", "1"}
