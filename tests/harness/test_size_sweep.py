from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from harness.parity import parity_batch_sizes, ragged_lengths
from harness.record import SAMPLES_SCHEMA, SIZES_COLUMNS
from harness.size_sweep import SizeSweep, sweep_batch_sizes, sweep_prefill
from runners.model_runner import ModelRunner
from tests.harness.tiny import tiny_config, tiny_runner


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    with tiny_runner() as runner:
        yield runner


def _sweep(
    runner: ModelRunner, overrides: dict[str, Any] | None = None, bandwidth: float = 1e10
) -> SizeSweep:
    return SizeSweep(runner, tiny_config(overrides).measure, seed=0, copy_bandwidth=bandwidth)


def _run(sweep: SizeSweep) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    rows: list[dict[str, Any]] = []
    samples: list[list[dict[str, Any]]] = []

    def on_row(row: dict[str, Any], row_samples: list[dict[str, Any]]) -> None:
        rows.append(row)
        samples.append(row_samples)

    sweep.run(on_row)
    return rows, samples


def test_every_batch_size_is_measured_by_graph_and_eager(runner: ModelRunner) -> None:
    rows, _ = _run(_sweep(runner, {"measure.context_lens": [8, 24]}))
    measured = [
        (row["context_len"], row["batch_size"], row["mode"], row["padded_batch_size"]) for row in rows
    ]
    assert measured == [
        (context_len, *point)
        for context_len in (8, 24)
        for point in ((2, "graph", 2), (2, "eager", 2), (3, "graph", 4), (3, "eager", 3))
    ]


def test_rows_and_raw_samples_have_the_columns_of_the_schema(runner: ModelRunner) -> None:
    rows, samples = _run(_sweep(runner))
    assert all(row.keys() == SIZES_COLUMNS.keys() for row in rows)
    assert all(sample.keys() <= SAMPLES_SCHEMA.keys() for group in samples for sample in group)
    for row, group in zip(rows, samples, strict=True):
        assert [sample["timing"] for sample in group].count("isolated") == row["num_samples"]


def test_the_unmet_condition_is_named(runner: ModelRunner) -> None:
    rows, _ = _run(_sweep(runner, {"measure.min_samples": 100_000, "measure.batch_sizes": [2]}))
    assert all("min_samples 100000" in row["unmet_condition"] for row in rows)


class _Throttling:
    """A card that throttles for the first `num_looks` looks."""

    def __init__(self, num_looks: int) -> None:
        self.num_looks = num_looks

    def throttle_reasons(self) -> list[str]:
        self.num_looks -= 1
        return ["hw_thermal_slowdown"] if self.num_looks >= 0 else []


def test_samples_of_a_throttled_block_are_discarded_and_counted(runner: ModelRunner) -> None:
    sweep = _sweep(runner, {"measure.batch_sizes": [2], "measure.timeout_s": 10.0, "measure.max_noise": 50.0})
    sweep._telemetry = _Throttling(2)  # type: ignore[assignment]
    rows, samples = _run(sweep)
    assert [row["num_discarded"] for row in rows] == [16, 0]
    assert all(row["num_samples"] == len(group) - 1 for row, group in zip(rows, samples, strict=True))


def test_a_point_that_was_throttled_throughout_has_null_figures(runner: ModelRunner) -> None:
    sweep = _sweep(runner, {"measure.batch_sizes": [2], "measure.timeout_s": 0.02})
    sweep._telemetry = _Throttling(10**9)  # type: ignore[assignment]
    rows, _ = _run(sweep)
    assert all(row["step_ms_p50"] is None and row["num_samples"] == 0 for row in rows)
    assert all(row["unmet_condition"] for row in rows)


def test_the_roofline_is_weights_and_cache_over_the_copy_bandwidth(runner: ModelRunner) -> None:
    rows, _ = _run(_sweep(runner, bandwidth=1e9))
    kv_bytes_per_token = 4 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head size, float32
    for row in rows:
        num_bytes = runner.loaded.decode_weight_bytes + row["num_kv_tokens"] * kv_bytes_per_token
        assert row["roofline_ms"] == pytest.approx(num_bytes / 1e9 * 1e3)
        assert row["roofline_fraction"] == pytest.approx(row["roofline_ms"] / row["step_ms_p50"])


def test_a_step_takes_at_least_as_long_as_its_parts(runner: ModelRunner) -> None:
    _, samples = _run(_sweep(runner))
    for sample in samples[0][:-1]:
        assert sample["step_ms"] >= sample["replay_ms"] + sample["host_prepare_us"] / 1e3


def test_the_sweep_gives_all_pages_back(runner: ModelRunner) -> None:
    free = runner.kv.num_free_pages
    _run(_sweep(runner))
    assert runner.kv.num_free_pages == free


def test_prefill_chunks_are_timed_by_tokens(runner: ModelRunner) -> None:
    rows: list[dict[str, Any]] = []
    sweep_prefill(
        runner,
        tiny_config(
            {"measure.prefill_tokens": [8, 32], "measure.timeout_s": 10.0, "measure.max_noise": 50.0}
        ).measure,
        0,
        rows.append,
    )
    assert [row["num_tokens"] for row in rows] == [8, 32]
    assert all(row["num_samples"] >= 8 for row in rows)


def test_the_sizes_chosen_lie_on_between_and_at_the_maximum() -> None:
    assert sweep_batch_sizes([1, 2, 4, 8], 10) == [1, 2, 3, 4, 5, 8, 9, 10]
    assert sweep_batch_sizes([], 3) == [1, 2, 3]
    assert len(sweep_batch_sizes(range(1, 257), 256)) == 256


def test_parity_covers_captured_sizes_padded_ones_and_those_above() -> None:
    assert parity_batch_sizes([2, 4, 8], 10) == [1, 2, 3, 4, 7, 8, 10]
    assert parity_batch_sizes([], 6) == [6]
    many = parity_batch_sizes(list(range(1, 257)), 256)
    assert many[0] == 1 and many[-1] == 256 and len(many) <= 48


def test_context_lengths_lie_on_both_sides_of_a_page_edge() -> None:
    lengths = ragged_lengths(8, page_size=16, max_len=128)
    assert {64, 65, 63, 1, 16, 17} <= set(lengths)
    assert max(ragged_lengths(64, page_size=16, max_len=10)) == 10
