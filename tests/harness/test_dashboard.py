"""A sweep's W&B workspace is made as code, and its panels show what the runs log."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.__main__ import main
from harness.compose import compose
from harness.dashboard import Scope, scope_of, specification, workspace
from harness.errors import ConfigError
from harness.experiment import run_job
from harness.progress import Progress
from harness.record import Status
from harness.tracking import publish
from tests.harness.job_folder import CONFIG, with_tracking, write_job
from tests.harness.wandb_file import OfflineRun, read_run
from tests.harness.wandb_server import server

ws = pytest.importorskip("wandb_workspaces.workspaces", reason="pip install 'cudagraph-harness[sweep]'")

ROOT = Path(__file__).parents[2]
SCOPE = Scope("tests", "team", "sweep-7")
QUICK = [
    "experiment=quick",
    "tracking=offline",
    "device=cpu",
    "model.config.num_hidden_layers=1",
    "measure.timeout_s=0.02",
]
#: Needs a device to measure it on.
MEMORY = {"figures/graph_mib", "captures/pool_bytes"}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of a job recorded with the memory of a GPU, one that failed, and one that really ran here."""
    folder = tmp_path_factory.mktemp("sweep")
    write_job(folder / "0")
    write_job(folder / "1", status=Status.CAPTURE_OOM, num_steps=4)
    for job in ("0", "1"):
        assert publish(folder / job)["status"] == "ok"
    config = compose([*QUICK, "tracking.project=tests", "sweep.id=sweep-7"])
    assert run_job(config, folder / "2", Progress(quiet=True)) is Status.OK
    return folder


@pytest.fixture(scope="module")
def runs(sweep: Path) -> list[OfflineRun]:
    return [read_run(path) for path in sorted(sweep.glob("*/wandb/offline-run-*"))]


def panels(view: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for section in view["spec"]["section"]["panelBankConfig"]["sections"]:
        yield from section["panels"]


def keys_of(value: Any) -> Iterator[str]:
    """The keys of runs in a panel's configuration, as the app reads them."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in ("xAxis", "yAxis"):
                yield inner.removeprefix("summary:")
            elif name == "metrics":
                yield from (key.removeprefix("summary_metrics.") for key in inner)
            else:
                yield from keys_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys_of(inner)


def test_each_key_in_it_is_one_that_a_run_logs(runs: list[OfflineRun]) -> None:
    logged = {key for run in runs for row in run.history for key in row}
    logged |= {key for run in runs for key in run.summary}
    view = specification(workspace(SCOPE))
    shown = [key for panel in panels(view) for key in keys_of(panel["config"])]
    assert len(set(shown)) >= 10
    assert set(shown) <= logged
    ran = {key for row in runs[-1].history for key in row} | set(runs[-1].summary)
    assert set(shown) - ran <= MEMORY
    (pattern,) = [p["config"]["metricRegex"] for p in panels(view) if p["config"].get("useMetricRegex")]
    assert {key for key in logged if re.fullmatch(pattern, key)} == {
        "sizes/graph/step_ms_p50",
        "sizes/eager/step_ms_p50",
    }
    columns = view["spec"]["section"]["runSets"][0]["runFeed"]["columnPinned"]
    assert {name.removeprefix("summary:") for name in columns if name.startswith("summary:")} <= logged


def test_the_table_of_failed_rows_is_that_of_the_failed_run(runs: list[OfflineRun]) -> None:
    (table,) = [p for p in panels(specification(workspace(SCOPE))) if p["viewType"] == "Weave"]
    assert '"failure"' in json.dumps(table)
    good, failed, _ = runs
    assert "failure" not in good.summary
    assert (failed.summary["failure"]["nrows"], failed.exit_code) == (1, 1)
    assert not [key for key in failed.scalars() if key.startswith("figures/")], (
        "a failed point is no candidate"
    )


def test_it_has_a_section_for_each_question() -> None:
    sections = specification(workspace(SCOPE))["spec"]["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == [
        "Which point to use",
        "Step time by batch size",
        "Waste",
        "Memory and start-up",
        "Failed rows",
    ]


def test_it_shows_the_runs_of_the_sweep_only() -> None:
    filters = json.dumps(specification(workspace(SCOPE))["spec"]["section"]["runSets"][0]["filters"])
    assert '"group"' in filters and "sweep-7" in filters
    everything = specification(workspace(Scope("tests")))["spec"]["section"]["runSets"][0]["filters"]
    assert "group" not in json.dumps(everything)


def test_it_comes_back_from_its_specification_as_it_was() -> None:
    first = workspace(SCOPE)
    again = ws.Workspace._from_model(first._to_model())
    assert specification(again) == specification(first)


def test_a_sweep_says_itself_where_its_runs_are(sweep: Path) -> None:
    assert scope_of(str(sweep)) == Scope("tests", None, "sweep-7")
    assert scope_of(str(sweep), "team", "other") == Scope("other", "team", "sweep-7")
    assert scope_of("tests", "team") == Scope("tests", "team", None)


def test_the_specification_is_written_to_a_file(sweep: Path, tmp_path: Path) -> None:
    assert main(["dashboard", str(sweep), "--json", str(tmp_path / "view.json")]) == 0
    view = json.loads((tmp_path / "view.json").read_text())
    assert (view["project"], view["displayName"]) == ("tests", "CUDA graphs: sweep-7")
    assert len(list(panels(view))) == 11


@pytest.mark.parametrize(
    ("config", "message"),
    [(None, "no folder that holds a job"), (CONFIG | {"sweep": {"id": None}}, "have no W&B group")],
)
def test_a_folder_without_a_sweep_is_refused(
    config: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    if config:
        write_job(tmp_path / "0", config=config)
    with pytest.raises(ConfigError, match=message):
        scope_of(str(tmp_path))


def test_a_folder_that_is_not_there_is_no_project() -> None:
    with pytest.raises(ConfigError, match="no folder that holds a job"):
        scope_of("outputs/no-such-sweep")


def test_the_group_given_goes_before_the_sweep(tmp_path: Path) -> None:
    write_job(tmp_path / "0", config=with_tracking(group="joined", entity="team"))
    assert scope_of(str(tmp_path)) == Scope("tests", "team", "joined")


def test_without_a_key_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    assert main(["dashboard", "tests"]) == 2
    assert "no W&B key on this machine: run `wandb login`" in capsys.readouterr().err


def test_without_the_package_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("harness.extras.find_spec", lambda name: None)
    assert main(["dashboard", "tests", "--json", "-"]) == 2
    assert "pip install 'cudagraph-harness[sweep]'" in capsys.readouterr().err


def test_a_server_that_refuses_the_key_is_told_in_one_message() -> None:
    code = """
import os, sys
os.environ |= {"WANDB_API_KEY": "0123456789abcdef" * 2 + "01234567", "WANDB_BASE_URL": sys.argv[1]}
from harness.__main__ import main
sys.exit(main(["dashboard", "tests", "--entity", "team"]))
"""
    with server("401") as address:
        command = [sys.executable, "-c", code, address]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "W&B did not take it" in done.stderr
