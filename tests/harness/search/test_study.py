"""A search proposes each point once, and keeps those that no other beats."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from harness.errors import ConfigError
from harness.search.space import read_space
from harness.search.study import Search
from harness.sweep import Point, SweepFolder

#: Step time and graph memory of each choice: two are on the front, one is beaten, one has no value.
COSTS = {"vllm": (2.0, 9.0), "all": (1.0, 20.0), "max_only": (3.0, 9.0), "explicit": (1.0, math.nan)}


def search(*overrides: str, **options: Any) -> Search:
    space = read_space(OverridesParser.create().parse_overrides(list(overrides)))
    return Search(space, ["step_ms", "graph_bytes"], **options)


def run(found: Search, num_trials: int, num_at_once: int = 1) -> list[str]:
    """Run the search as its sweeper does; returns the choices in the order in which they were tried."""
    tried: list[str] = []
    while trials := found.ask(min(num_at_once, num_trials - len(tried))):
        for trial in trials:
            tried.append(trial.params["capture"])
            found.tell(trial, COSTS[tried[-1]])
    return tried


@pytest.mark.parametrize("sampler", ["tpe", "nsga2", "random"])
def test_every_point_is_tried_once_and_then_the_search_ends(sampler: str) -> None:
    tried = run(search("capture=vllm,all,max_only,explicit", sampler=sampler), num_trials=50)
    assert sorted(tried) == sorted(COSTS)


def test_no_more_jobs_than_asked_for_also_several_at_once() -> None:
    assert len(run(search("capture=vllm,all,max_only,explicit"), num_trials=3, num_at_once=2)) == 3


def test_the_same_seed_proposes_the_same_jobs() -> None:
    orders = [run(search("capture=vllm,all,max_only,explicit", seed=3), num_trials=4) for _ in range(2)]
    assert orders[0] == orders[1]


def test_the_pareto_set_holds_what_no_other_job_beats(tmp_path: Path) -> None:
    found = search("capture=vllm,all,max_only,explicit")
    tried = run(found, num_trials=50)
    sweep = SweepFolder(tmp_path)
    for number, choice in enumerate(tried):
        (tmp_path / str(number)).mkdir()
        row = {"job": str(number), "graph_backend": "emulated", "verified": True, "overrides": choice}
        sweep.put(
            tmp_path / str(number),
            Point(number, None, "run", row | dict.fromkeys(("job_dir", "resumed_from"))),
        )
    found.write(tmp_path)
    written = yaml.safe_load((tmp_path / "optimization_results.yaml").read_text())
    assert (written["num_trials"], written["num_failed"]) == (4, 1)
    assert [entry["params"]["capture"] for entry in written["pareto"]] == ["all", "vllm"]
    assert written["pareto"][0]["values"] == {"step_ms": 1.0, "graph_bytes": 20.0}
    assert written["pareto"][0]["job"] == str(tried.index("all"))
    assert written["pareto"][0]["graph_backend"] == "emulated"


def test_a_direction_may_be_turned() -> None:
    found = search("capture=vllm,all,max_only,explicit", directions=["maximize", "minimize"])
    run(found, num_trials=50)
    assert {trial.params["capture"] for trial in found.pareto()} == {"max_only"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"directions": ["minimize"]},
            r"hydra\.sweeper\.directions=\[minimize\]: give minimize or maximize once",
        ),
        ({"directions": ["down", "up"]}, r"for each of job\.objective \(step_ms, graph_bytes\)"),
        ({"sampler": "magic"}, r"hydra\.sweeper\.sampler=magic: choose one of tpe, nsga2, random"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        search("capture=vllm,all", **options)
