"""The committed measurements keep what the tables say of them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

H200 = Path(__file__).parents[2] / "docs/results/h200"
SIZES = sorted(H200.glob("*/sizes.csv"))


@pytest.mark.parametrize("path", SIZES, ids=lambda path: path.parent.name)
def test_a_step_of_a_graph_is_its_replay_and_what_the_host_exposes(path: Path) -> None:
    with path.open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["mode"] == "graph" and row["replay_ms_p50"]]
    assert rows
    for row in rows:
        # Records before the column was there: an isolated step exposes all of its preparation.
        exposed_us = float(row.get("host_exposed_us_p50") or row["host_prepare_us_p50"])
        assert float(row["step_ms_p50"]) <= 1.05 * (float(row["replay_ms_p50"]) + exposed_us / 1e3)
