"""The committed measurements keep what the tables say of them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.planner.cost_source import DEFAULT_RUN, load_costs

RESULTS = Path(__file__).parents[2] / "docs/results"
H200 = RESULTS / "h200"
SIZES = sorted(H200.glob("*/sizes.csv"))
PLANNER = sorted(RESULTS.glob("planner_*"))


@pytest.mark.parametrize("path", SIZES, ids=lambda path: path.parent.name)
def test_a_step_of_a_graph_is_its_replay_and_what_the_host_exposes(path: Path) -> None:
    with path.open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["mode"] == "graph" and row["replay_ms_p50"]]
    assert rows
    for row in rows:
        # Records before the column was there: an isolated step exposes all of its preparation.
        exposed_us = float(row.get("host_exposed_us_p50") or row["host_prepare_us_p50"])
        assert float(row["step_ms_p50"]) <= 1.05 * (float(row["replay_ms_p50"]) + exposed_us / 1e3)


@pytest.mark.parametrize("run", PLANNER, ids=lambda run: run.name)
def test_a_planner_record_is_a_verified_source_of_costs_with_a_replay(run: Path) -> None:
    costs = load_costs(run)
    assert costs.source.verified and costs.source.graph_backend == "cuda"
    assert costs.prefill is not None and (run / "requests.parquet").exists()


def test_the_default_record_is_committed() -> None:
    assert DEFAULT_RUN in PLANNER


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/**/result.json")), ids=lambda path: path.parent.name)
def test_a_record_names_no_path_and_no_kernel_build_of_its_machine(path: Path) -> None:
    result = json.loads(path.read_bytes())
    assert not [text for text in texts(result) if text.startswith("/")]
    assert "-" not in result["environment"]["platform"]


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from texts(item)
