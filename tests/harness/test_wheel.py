"""The wheel holds all of the program, and runs from an empty folder."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = (
    "conf",
    "harness",
    "runners",
    "hydra_plugins",
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources and installed into a folder of its own."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    isolation = ["--no-isolation"] if importlib.util.find_spec("setuptools") else []
    run(sys.executable, "-m", "build", "--wheel", *isolation, "--outdir", str(work), str(source))
    (wheel,) = work.glob("cudagraph_harness-*.whl")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--quiet")
    run(*pip, "--target", str(work / "site"), str(wheel))
    return work / "site"


def run(*command: str, cwd: Path | None = None, **environment: str) -> str:
    ran = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_installed_program_composes_a_job_from_an_empty_folder(site: Path, tmp_path: Path) -> None:
    script = str(site / "bin" / "cudagraph-harness")
    printed = run(script, "--cfg", "job", "capture=all", cwd=tmp_path, PYTHONPATH=str(site))
    assert "policy: all" in printed
    where = run(
        sys.executable, "-c", "import harness.compose as c; print(c.__file__, c.config_path())",
        cwd=tmp_path, PYTHONPATH=str(site),
    )  # fmt: skip
    assert where.split() == [str(site / "harness" / "compose.py"), "pkg://harness.conf"]


def test_the_wheel_holds_every_module_and_every_configuration(site: Path) -> None:
    for package in ("harness", "runners", "hydra_plugins"):
        assert files(ROOT / package, ".py") == files(site / package, ".py", leave_out="conf/")
    assert files(ROOT / "conf", ".yaml") == files(site / "harness" / "conf", ".yaml")
    data = "harness/workload/data"
    assert files(ROOT / data, ".csv") == files(site / data, ".csv") == {"azure_2023_conversation.csv"}


def files(folder: Path, suffix: str, leave_out: str = "-") -> set[str]:
    names = {str(path.relative_to(folder)) for path in folder.rglob(f"*{suffix}")}
    return {name for name in names if not name.startswith(leave_out)}
