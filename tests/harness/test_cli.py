"""The command line: verbs, exit codes, one readable message for what cannot run, and no traceback."""

from __future__ import annotations

import csv
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from harness.__main__ import main
from harness.record import Status

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Jobs write under the current folder, and Hydra replaces the root logger's handlers."""
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def job_folders() -> list[Path]:
    return sorted(path.parent for path in Path("outputs").rglob("result.json"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runner.max_batch_size=0"], "runner.max_batch_size=0: must be at least 1"),
        (["runner.max_batch=4"], "runner.max_batch=4: unknown key; did you mean runner.max_batch_size?"),
        (["+runner.fast=true"], "runner.fast=true: unknown key; runner has kind"),
        (["nonsense=1"], "nonsense=1: unknown key"),
        (["runner.max_batch_size=many"], "runner.max_batch_size=many: give a whole number"),
        (["runner.max_batch_size=1,2"], "runner.max_batch_size=1,2: this key takes one value"),
        (["model=tinny"], "model=tinny: choose one of"),
        (["model=tyni"], "; did you mean tiny?"),
        (["model=3"], "model=3: choose one of"),
        (
            ["tracking=null"],
            "tracking=null: choose one of disabled, offline, online; write tracking=disabled",
        ),
        (["-m", "experiment=quick,null"], "experiment=quick,null: null cannot be swept beside others"),
        (["output_dir=/proc/nowhere"], "output_dir=/proc/nowhere: No such file or directory: give a folder"),
        (["output_dir=/dev/null"], "output_dir=/dev/null: File exists: give a folder that can be written"),
        (["output_dir=/dev/null/job"], "output_dir=/dev/null/job: Not a directory: give a folder"),
        (["-m", "seed=1,2", "output_dir=/dev/null"], "output_dir=/dev/null: File exists: give a folder"),
        (["experiment=[1,2]"], "experiment=[1,2]: choose one of"),
        (["~model=[a,b]"], "a group takes the name of one choice"),
        (["+seed=3"], "this key is there already: write seed=3"),
        (["measure.batch_sizes={a:1}"], "give a list such as measure.batch_sizes=[1,2,4]"),
        (["capture.sizes=[{a:1}]"], "give a list such as capture.sizes=[1,2,4]"),
        (["++hydra.verbose={}"], "does not compose"),
        (["compile=off"], "write compile=none"),
        (["compile.mode=off"], "YAML reads on, off, yes and no as a boolean: write compile.mode=none"),
        (["tracking=off"], "write tracking=disabled"),
        (["seed=${nowhere}"], "seed=${nowhere}: the ${...} in this value names no key"),
        (["capture.sizes=[1,"], "capture.sizes=[1,: cannot be read"),
        (
            ["-m", "capture.sizes=1,2"],
            "write capture.sizes=[1,2,4]; several lists: capture.sizes=[1,2],[1,4]",
        ),
        (["model._target_=os.system"], "may not name Python objects"),
        (["--config-dir", "nowhere"], "--config-dir=nowhere: no such folder"),
        (["--experimental-rerun", "x.pickle"], "not used here"),
        (["output_dir="], "name a folder"),
        (["sweep.id=night"], "sweep.id=night: names a sweep, and sweep.resume goes on with one: add -m"),
        (["-m", "seed=1,2", "sweep.id=../x"], "sweep.id=../x: give a name of letters, digits"),
        (["-m", "seed=1,2", "sweep.id=a,b"], "sweep.id=a,b: is the same for all jobs"),
        (["-m", "seed=1,2", "sweep.resume=true"], "which sweep? add sweep.id=NAME, or output_dir=FOLDER"),
        (["-m", "seed=1,2", "hydra.sweep.subdir=a/b"], "hydra.sweep.subdir=a/b: give the name of one folder"),
        (["hydra/launcher=jobs", "-m"], "hydra/launcher=jobs: "),
        (["plan", "no-such-folder"], "no-such-folder"),
        (["plam"], "did you mean plan?"),
        (["runn"], "did you mean run?"),
    ],
)
def test_what_cannot_run_ends_with_2_and_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1
    assert "Traceback" not in printed


def test_a_refused_job_is_recorded_in_its_folder() -> None:
    assert main(["runner.max_batch_size=0"]) == 2
    (folder,) = job_folders()
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == Status.INVALID_CONFIG
    assert result["error"]["message"] == "runner.max_batch_size=0: must be at least 1"


def test_a_used_folder_is_not_written_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["seed=-1", "output_dir=mine"]) == 2
    before = Path("mine/result.json").read_bytes()
    assert main(["seed=-2", "output_dir=mine"]) == 2
    assert "output_dir=mine: holds a record already" in capsys.readouterr().err
    assert Path("mine/result.json").read_bytes() == before


def test_the_composed_job_can_be_printed_with_its_changes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cfg", "job", "-p", "capture", "capture=explicit", "capture.sizes=1,4"]) == 0
    assert "sizes:\n- 1\n- 4" in capsys.readouterr().out
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    ("overrides", "policy"),
    [
        (["experiment=null"], "vllm"),
        (["experiment=quick", "experiment=null"], "vllm"),
        (["experiment=null", "experiment=quick"], "powers_of_two"),
    ],
)
def test_null_is_the_experiment_without_an_overlay(
    overrides: list[str], policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*overrides, "--cfg", "job", "-p", "capture"]) == 0
    assert f"policy: {policy}" in capsys.readouterr().out


def test_the_version_is_that_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"cudagraph-harness {version('cudagraph-harness')}\n"


def test_flags_and_overrides_may_be_mixed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["seed=3", "--cfg", "job", "capture=all"]) == 0
    printed = capsys.readouterr().out
    assert "seed: 3" in printed
    assert "policy: all" in printed


def test_a_point_that_does_not_compose_refuses_the_sweep_before_the_first_job(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["-m", "seed=-1", "model=tiny,tinny"]) == 2
    assert "model=tinny: choose one of" in capsys.readouterr().err
    assert not job_folders()


def test_a_sweep_has_a_row_for_each_point_that_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "capture.sizes=[1,2,4],[1,2,4,8]"
    assert main(["-m", "capture=explicit", "seed=-1", "tracking.tags=[]", sizes, "output_dir=sweep"]) == 1
    with Path("sweep/sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["invalid_config", "invalid_config"]
    assert [row["overrides"].split()[-2] for row in rows] == [
        "capture.sizes=[1,2,4]",
        "capture.sizes=[1,2,4,8]",
    ]
    assert all("must be at least 0" in row["error_message"] for row in rows)
    printed = capsys.readouterr().err
    assert "2 job(s) did not end ok" in printed
    assert "seed=-1: must be at least 0" in printed
    assert Path("sweep/1/job.log").read_text() == "error: seed=-1: must be at least 0\n"


def test_jobs_after_the_first_failure_are_skipped_when_asked_for() -> None:
    assert main(["-m", "seed=-1,-2,-3", "sweep.stop_on_first_failure=true", "output_dir=sweep"]) == 1
    with Path("sweep/sweep.csv").open() as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["invalid_config", "skipped", "skipped"]


def test_a_named_sweep_is_gone_on_with_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["-m", "seed=-1,-2", "sweep.id=night"]
    assert main(arguments) == 1
    before = Path("outputs/night/sweep.csv").read_text()
    assert main(arguments) == 2
    assert "add sweep.resume=true" in capsys.readouterr().err
    assert main([*arguments, "sweep.resume=true"]) == 1
    with Path("outputs/night/sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["resumed_from"] for row in rows] == [row["job_dir"] for row in rows]
    assert [row["overrides"] for row in rows] == ["seed=-1", "seed=-2"]
    assert len(before.splitlines()) == len(rows) + 1


@pytest.mark.parametrize("damaged", ["result.json", "point.json"])
def test_a_point_whose_files_are_damaged_runs_again_and_is_named(
    damaged: str, capsys: pytest.CaptureFixture[str]
) -> None:
    point = ["-m", "seed=1,-1", "model.source=gguf", "output_dir=sweep"]
    assert main(point) == 1
    before = Path("sweep/sweep.csv").read_bytes()
    Path(f"sweep/0/{damaged}").write_text("{")
    capsys.readouterr()
    assert main([*point, "sweep.resume=true"]) == 1
    assert re.search(rf"^\[0\] .*again: \S*sweep/0/{damaged} is damaged", capsys.readouterr().err, re.M)
    with open("sweep/sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [Path(row["resumed_from"]).name for row in rows] == ["", "1"]
    assert before.count(b"\n") == len(rows) + 1


def test_the_classes_behind_launchers_are_not_offered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "seed=1,2", "hydra/launcher=joblb"]) == 2
    shown = capsys.readouterr().err
    assert "submitit_slurm; did you mean joblib?" in shown and "_class" not in shown


def test_two_sweeps_of_one_second_have_folders_of_their_own() -> None:
    for _ in range(2):
        assert main(["-m", "seed=-1,-2"]) == 1
    sweeps = {folder.parent for folder in job_folders()}
    assert len(sweeps) == 2
    assert len({sweep.name.rsplit("-", 1)[-1] for sweep in sweeps}) == 2
    assert all((sweep / "sweep.csv").exists() for sweep in sweeps)


def test_the_front_door_and_the_parent_of_a_sweep_import_nothing_heavy() -> None:
    script = """
import sys
from harness.__main__ import main
for arguments in (["--help"], ["--cfg", "job"], ["-m", "seed=-1,-2"], ["runner.max_batch_size=0"]):
    main(arguments)
heavy = {"torch", "transformers", "wandb", "pandas", "flashinfer", "pyarrow", "plotly"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_shell_completion_knows_groups_choices_and_keys() -> None:
    def complete(line: str) -> list[str]:
        ran = subprocess.run(
            [sys.executable, "-m", "harness", "-sc", "query=bash"],
            env={"PYTHONPATH": str(ROOT), "COMP_LINE": f"cudagraph-harness {line}"},
            capture_output=True,
            text=True,
            check=True,
        )
        return ran.stdout.split()

    assert complete("padding=") == [
        f"padding={name}" for name in ("cheapest", "exact", "max", "nearest", "split")
    ]
    assert complete("runner.max_batch") == ["runner.max_batch_size="]


def test_a_reader_who_has_seen_enough_ends_the_output_without_a_word() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "harness", "--help"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1
