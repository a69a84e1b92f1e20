from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from harness.ragged_sweep import RaggedSweep
from harness.record import RAGGED_COLUMNS
from runners.model_runner import ModelRunner
from tests.harness.tiny import tiny_config, tiny_runner


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    with tiny_runner() as runner:
        yield runner


def rows_of(runner: ModelRunner, **overrides: Any) -> list[dict[str, Any]]:
    measure = tiny_config({f"measure.{name}": value for name, value in overrides.items()}).measure
    rows: list[dict[str, Any]] = []
    RaggedSweep(runner, measure, seed=0).run(rows.append)
    return rows


def test_one_request_is_long_and_stands_first_or_last(runner: ModelRunner) -> None:
    rows = rows_of(runner, longest_lens=[40])
    uneven = [row for row in rows if row["place"] != "padded"]
    assert [(row["batch_size"], row["place"]) for row in uneven] == [
        (size, place) for size in (2, 4) for place in ("first", "last")
    ]
    assert all(row["num_kv_tokens"] == (row["batch_size"] - 1) * 10 + 40 for row in uneven)
    assert all(row.keys() == RAGGED_COLUMNS.keys() and row["num_samples"] == 8 for row in rows)


def test_fewer_requests_than_rows_are_measured_on_each_graph(runner: ModelRunner) -> None:
    padded = [row for row in rows_of(runner, longest_lens=[40]) if row["place"] == "padded"]
    assert [(row["batch_size"], row["padded_batch_size"], row["num_kv_tokens"]) for row in padded] == [
        (1, 2, 40),
        (1, 4, 40),
        (2, 4, 80),
    ]


def test_eager_batches_are_measured_where_they_are_asked_for(runner: ModelRunner) -> None:
    rows = rows_of(runner, longest_lens=[40], eager_batch_sizes=[1, 3])
    assert {row["batch_size"] for row in rows if row["mode"] == "eager"} == {3}, "one request is never uneven"


def test_all_pages_come_back_and_nothing_is_measured_unasked(runner: ModelRunner) -> None:
    free = runner.kv.num_free_pages
    assert rows_of(runner, longest_lens=[20, 40])
    assert runner.kv.num_free_pages == free
    assert rows_of(runner) == []
