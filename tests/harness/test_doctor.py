"""doctor says what this machine can run, and gives the fix for what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness import doctor
from harness.__main__ import main
from harness.doctor import Finding, Verdict


def test_doctor_ends_with_0_where_the_main_job_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for subject in (
        "python",
        "torch",
        "gpu",
        "cuda graphs",
        "flashinfer",
        "cuda-bindings",
        "compiler",
        "wandb",
        "disk",
        "traces",
        "weights",
    ):
        assert f" {subject}" in printed
    assert "The main job runs here" in printed


def test_doctor_ends_with_1_and_names_what_blocks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "fix: pip install -e ." in printed
    assert "cannot run here until this is fixed: packages" in printed


def test_a_hidden_gpu_is_told_from_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.nvidia.driver_version", lambda: "580.1")
    monkeypatch.setattr("harness.nvidia.visible_gpus", list)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "CUDA_VISIBLE_DEVICES='7'" in doctor.check_gpu().fix


def test_an_old_flashinfer_is_not_called_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: "0.6.9")
    assert doctor.check_flashinfer().verdict is Verdict.LIMITED
    monkeypatch.setattr(doctor, "_version", lambda package: "0.7.4")
    assert doctor.check_flashinfer().verdict is Verdict.OK


def test_missing_bindings_limit_and_come_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    found = doctor.check_nvrtc()
    assert (found.verdict, found.fix) == (Verdict.LIMITED, "pip install -e '.[gpu]'")
    monkeypatch.setattr(doctor, "_version", lambda package: "13.0.3")
    assert doctor.check_nvrtc() == Finding("cuda-bindings", Verdict.OK, "13.0.3")


def test_missing_traces_come_with_the_place_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CGH_TRACES", str(tmp_path))
    assert "set CGH_TRACES" in doctor.check_traces().fix


def test_weights_that_were_not_fetched_come_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDAGRAPH_HARNESS_CACHE", str(tmp_path))
    assert doctor.check_weights().fix == "make smollm2"
    (tmp_path / "smollm2_135m").mkdir()
    (tmp_path / "smollm2_135m" / "SOURCE.json").write_text("{}")
    assert doctor.check_weights().verdict is Verdict.OK


def test_a_machine_without_a_compiler_is_told_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert doctor.check_compiler() == Finding(
        "compiler", Verdict.LIMITED, "no C++ compiler, no nvcc: compile=none only", "apt install g++"
    )


def test_doctor_has_a_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--help"])
    assert ended.value.code == 0
    assert "what is missing, with the fix" in capsys.readouterr().out


def _without_packages(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program in a Python that has no package but the standard ones."""
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-S", "-m", "harness", *arguments],
        env={"PYTHONPATH": root},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_python_without_the_packages_is_told_in_a_line_where_they_are() -> None:
    ran = _without_packages("capture=all")
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert f"{sys.executable} has no package hydra" in ran.stderr
    assert "`. .venv/bin/activate`" in ran.stderr


def test_doctor_runs_without_the_packages_and_lists_them() -> None:
    ran = _without_packages("doctor")
    assert ran.returncode == 1, ran.stderr
    for package in ("torch", "hydra-core", "nvidia-ml-py"):
        assert package in ran.stdout
    assert "cannot run here until this is fixed" in ran.stdout
