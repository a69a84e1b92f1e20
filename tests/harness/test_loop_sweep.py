from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from harness.build import scheduler_limits
from harness.loop_sweep import LoopSweep
from harness.record import LOOP_COLUMNS
from runners.model_runner import ModelRunner
from tests.harness.tiny import tiny_config, tiny_runner

CONFIG = {"runner.max_batch_size": 4, "runner.prefill_chunk_tokens": 16}


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    with tiny_runner(CONFIG) as runner:
        yield runner


@pytest.fixture(scope="module")
def rows(runner: ModelRunner) -> list[dict[str, Any]]:
    limits = scheduler_limits(tiny_config(CONFIG))
    rows: list[dict[str, Any]] = []
    LoopSweep(runner, limits, [1, 4], [4, 16, 64], [16, 40], seed=0).run("before", rows.append)
    return rows


def test_decode_steps_are_told_apart_by_what_they_follow(rows: list[dict[str, Any]]) -> None:
    decodes = [(row["batch_size"], row["previous"]) for row in rows if row["phase"] == "decode"]
    # One row of the largest batch is left to the visitors.
    assert decodes == [(1, "decode"), (1, "prefill"), (3, "decode"), (3, "prefill")]
    padded = [row["padded_batch_size"] for row in rows if row["phase"] == "decode"]
    assert padded == [2, 2, 4, 4]


def test_chunks_are_measured_after_every_context(rows: list[dict[str, Any]]) -> None:
    chunks = {(row["num_tokens"], row["num_cached_tokens"]) for row in rows if row["phase"] == "prefill"}
    # A chunk is never above the largest; contexts are whole chunks; the smallest ones have no context.
    assert chunks == {(4, 0), (16, 0), (16, 16), (16, 32)}


def test_the_hosts_share_is_what_the_device_does_not_take(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row.keys() == LOOP_COLUMNS.keys()
        assert 0 < row["host_ms_mean"] < row["pace_ms_mean"]
        assert row["num_samples"] > 0 and row["moment"] == "before"
        assert row["graph_backend"] == ("emulated" if row["phase"] == "decode" else "none")


def test_the_loop_gives_everything_back(runner: ModelRunner, rows: list[dict[str, Any]]) -> None:
    assert rows and runner.kv.num_free_pages == runner.kv.pool.num_pages - 1


def test_a_batch_that_the_pool_does_not_hold_is_left_out(runner: ModelRunner) -> None:
    from dataclasses import replace

    limits = replace(scheduler_limits(tiny_config(CONFIG)), num_pages=14)
    rows: list[dict[str, Any]] = []
    LoopSweep(runner, limits, [1, 4], [4], [16], seed=0).run("before", rows.append)
    assert {row["batch_size"] for row in rows if row["phase"] == "decode"} == {1}
