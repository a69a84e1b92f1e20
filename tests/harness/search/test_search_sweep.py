"""A search over real jobs, from its command line to the Pareto set."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import yaml

from harness.__main__ import main

SHORT = [
    "-m", "experiment=search_capture_and_padding", "device=cpu", "tracking=disabled", "measure=none",
    "parity.enabled=false", "runner.max_batch_size=2", "workload.max_requests=2", "workload=steady",
    "workload.prompt_len=8", "workload.output_len=4", "workload.clock=fixed", "workload.fixed_step_ms=10",
    "model.config.num_hidden_layers=1",
]  # fmt: skip


def test_a_search_runs_its_jobs_and_writes_the_pareto_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = tmp_path / "sweep"
    arguments = [
        *SHORT, "capture=max_only,all", "padding=nearest", "capture.max_size=2,-1", f"output_dir={sweep}",
        "job.objective=[steps.mean_decode_ms,capture.num_sizes]", "hydra.sweeper.n_jobs=4",
        "hydra/launcher=joblib", "hydra.launcher.gpus=[0,1]",
    ]  # fmt: skip
    assert main(arguments) == 1  # half of the points cannot run
    with (sweep / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sorted(row["status"] for row in rows) == ["invalid_config", "invalid_config", "ok", "ok"]
    found = yaml.safe_load((sweep / "optimization_results.yaml").read_text())
    assert (found["num_trials"], found["num_failed"]) == (4, 2)
    # The fixed clock makes the steps equal, so that the list of one size beats the other.
    (best,) = found["pareto"]
    assert best["params"] == {"capture": "max_only", "capture.max_size": "2"}
    assert best["values"] == {"steps.mean_decode_ms": 10.0, "capture.num_sizes": 1.0}
    assert best["graph_backend"] == "emulated"
    environment = json.loads((sweep / best["job"] / "result.json").read_text())["environment"]
    assert environment["cuda_visible_devices"] in ("0", "1")
    assert f"[{best['job']}] capture=max_only capture.max_size=2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["job.objective=[]"], "job.objective=[]: say what to search by"),
        (["job.objective=[mean_tpot_ms]"], "did you mean summary.mean_tpot_ms?"),
        (["hydra.sweeper.n_trials=0"], "hydra.sweeper.n_trials=0: give a whole number"),
        (["hydra.sweeper.sampler=magic"], "choose one of tpe, nsga2, random"),
        (["capture=max_only,nothing"], "capture=nothing"),
        (["capture=all", "padding=max"], "nothing to search"),
    ],
)
def test_a_search_that_cannot_run_is_refused_before_its_first_job(
    overrides: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SHORT, *overrides, f"output_dir={tmp_path}/sweep"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "sweep/0").exists()
