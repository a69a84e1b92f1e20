from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from harness.cache_flush import CacheFlush, last_level_cache_bytes
from harness.parity import parity_batch_sizes, ragged_lengths
from harness.point_samples import PointSamples
from harness.prefill_sweep import sweep_prefill
from harness.record import SAMPLES_SCHEMA, SIZES_COLUMNS
from harness.size_sweep import SizeSweep, sweep_batch_sizes, sweep_warnings
from harness.step_timer import StepTimer, StepTiming
from harness.telemetry import FIGURES
from runners.compile_counts import CompileCounts
from runners.forward_batch import ForwardBatch, LogitsProcessorOutput
from runners.model_runner import ModelRunner
from runners.padding import StepPlan
from tests.harness.fake_nvml import POWER_CAP, FakeNvml, throttled_first
from tests.harness.tiny import tiny_config, tiny_runner

#: Time enough, and any noise will do.
QUIET: dict[str, Any] = {"measure.timeout_s": 10.0, "measure.max_noise": 50.0}


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    with tiny_runner() as runner:
        yield runner


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other processes do on this machine must not change what is counted here."""
    monkeypatch.setattr(StepTimer, "_num_preemptions", lambda self: None)


def _sweep(
    runner: ModelRunner,
    overrides: dict[str, Any] | None = None,
    bandwidth: float = 1e10,
    nvml: FakeNvml | None = None,
) -> SizeSweep:
    telemetry = None if nvml is None else nvml.telemetry()
    return SizeSweep(runner, tiny_config(overrides).measure, 0, bandwidth, telemetry=telemetry)


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


def test_samples_of_a_throttled_block_are_discarded_and_counted(runner: ModelRunner) -> None:
    sweep = _sweep(runner, QUIET | {"measure.batch_sizes": [2]}, nvml=FakeNvml(throttled_first(2)))
    rows, samples = _run(sweep)
    assert [row["num_discarded"] >= 16 for row in rows] == [True, False]
    assert [row["throttle_reasons"] for row in rows] == ["hw_thermal_slowdown", None]
    assert all(row["num_samples"] == len(group) - 1 for row, group in zip(rows, samples, strict=True))


def test_a_point_that_was_throttled_throughout_has_null_figures(runner: ModelRunner) -> None:
    nvml = FakeNvml(throttle_masks=itertools.repeat(POWER_CAP), sm_clocks_mhz=itertools.repeat(1650))
    rows, _ = _run(_sweep(runner, {"measure.batch_sizes": [2], "measure.timeout_s": 0.02}, nvml=nvml))
    assert all(row["step_ms_p50"] is None and row["num_samples"] == 0 for row in rows)
    assert all(row["unmet_condition"] and row["sm_clock_mhz"] is None for row in rows)


def test_a_row_holds_what_the_card_told_while_it_was_measured(runner: ModelRunner) -> None:
    overrides = QUIET | {"measure.batch_sizes": [2], "measure.energy_s": 0.001}
    rows, _ = _run(_sweep(runner, overrides, nvml=FakeNvml(energy_step_mj=3200, num_processes=2)))
    for row in rows:
        told = [row[name] for name in ("sm_clock_mhz", "mem_clock_mhz", "power_w", "temperature_c")]
        assert told == [1980, 3201, 412.5, 54]
        assert row["num_other_processes"] == 1
        assert row["energy_mj_per_token"] == pytest.approx(3200 / (16 * 2)), (
            "3.2 J for 16 steps of two tokens"
        )
    assert list(sweep_warnings(rows)) == [
        "1 other process(es) computed on the GPU during the size sweep; its times are not the model's alone"
    ]


def test_without_a_card_telemetry_is_null(runner: ModelRunner) -> None:
    rows, _ = _run(_sweep(runner))
    names = (*FIGURES, "energy_mj_per_token", "num_other_processes", "throttle_reasons")
    assert all(row[name] is None for row in rows for name in names)
    assert list(sweep_warnings(rows)) == []


def test_a_clock_that_falls_during_the_sweep_is_warned_about() -> None:
    rows = [{"sm_clock_mhz": clock, "num_other_processes": None} for clock in (1980, 1980, 1755)]
    (warning,) = sweep_warnings(rows)
    assert warning.startswith("SM clock fell from 1980 to 1755 MHz during the size sweep")


class _SlowFirst(StepTimer):
    """The first calls of each batch size take as long as compiling does."""

    num_slow = 1

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.calls: Counter[tuple[int, str]] = Counter()

    def isolated(self, batch: ForwardBatch, plan: StepPlan | None) -> StepTiming:
        assert plan is not None
        self.calls[batch.batch_size, plan.mode] += 1
        is_slow = self.calls[batch.batch_size, plan.mode] <= self.num_slow
        return replace(super().isolated(batch, plan), step_ms=9000.0 if is_slow else 1.0)


@pytest.mark.parametrize("num_slow", [1, 3])
@pytest.mark.parametrize("timeout_s", [2e-3, 0.05])
def test_a_slow_first_call_never_enters_a_sample_however_short_the_time(
    runner: ModelRunner, num_slow: int, timeout_s: float
) -> None:
    sweep = _sweep(runner, {"measure.num_warmup": 0, "measure.timeout_s": timeout_s})
    sweep._timer = timer = _SlowFirst(runner)
    timer.num_slow = num_slow
    _, samples = _run(sweep)
    isolated = [one["step_ms"] for group in samples for one in group if one["timing"] == "isolated"]
    assert isolated and set(isolated) == {1.0}
    assert min(timer.calls.values()) > 3


def test_samples_taken_while_something_was_compiled_are_discarded_and_counted(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shape that torch.compile has not seen turns up within the samples of the first point."""
    counts = itertools.chain([CompileCounts(), CompileCounts(num_recompiles=1)])
    last = [CompileCounts(num_recompiles=1)]
    monkeypatch.setattr(
        type(runner), "compile_counts", property(lambda self: next(counts, last[0])), raising=True
    )
    rows, _ = _run(_sweep(runner, QUIET | {"measure.batch_sizes": [2]}))
    assert [row["num_discarded"] for row in rows] == [8, 0]
    assert all(row["num_samples"] >= 8 for row in rows)


def test_rounds_visit_every_point_in_turn_and_share_its_samples(runner: ModelRunner) -> None:
    overrides = QUIET | {"measure.rounds": 3, "measure.batch_sizes": [2], "measure.min_samples": 24}
    visits: list[str] = []

    class Watched(SizeSweep):
        def _sample(self, samples: PointSamples, batch: ForwardBatch, index: int) -> None:
            visits.append(samples.point.plan.mode)
            super()._sample(samples, batch, index)

    sweep = Watched(runner, tiny_config(overrides).measure, 0, 1e10)
    rows, samples = _run(sweep)
    assert visits == ["graph", "eager"] * 3
    for row, group in zip(rows, samples, strict=True):
        assert Counter(one["round"] for one in group if one["timing"] == "isolated") == {0: 8, 1: 8, 2: 8}
        assert row["num_samples"] == 24 and row["round_std"] >= 0


def test_the_condition_of_a_round_is_named_with_it(runner: ModelRunner) -> None:
    rows, _ = _run(
        _sweep(runner, {"measure.rounds": 2, "measure.min_samples": 100_000, "measure.batch_sizes": [2]})
    )
    assert all("round 1: " in row["unmet_condition"] for row in rows)
    assert all("round 2: " in row["unmet_condition"] for row in rows)


def test_the_cache_is_flushed_before_each_isolated_step_and_outside_of_its_time(runner: ModelRunner) -> None:
    flushed: list[int] = []

    class Flush(CacheFlush):
        def __call__(self) -> None:
            assert runner.stopwatch is None, "a step is being timed"
            flushed.append(self.num_bytes)
            super().__call__()

    sweep = _sweep(runner, QUIET | {"measure.flush_cache": True, "measure.batch_sizes": [2]})
    assert sweep.describe()["flushed_bytes"] == 2 * last_level_cache_bytes(runner.device)
    sweep._timer = StepTimer(runner, Flush(runner.device))
    rows, _ = _run(sweep)
    assert len(flushed) >= sum(row["num_samples"] for row in rows)
    assert all(row["flush_cache"] for row in rows)


def test_the_wall_time_of_the_sweep_is_accounted_for(runner: ModelRunner) -> None:
    sweep = _sweep(runner)
    _run(sweep)
    overhead = sweep.describe()["overhead"]
    assert sum(
        overhead[name] for name in overhead if name not in ("wall_s", "measuring_share")
    ) == pytest.approx(overhead["wall_s"])
    assert 0 < overhead["measuring_share"] < 1


def test_the_roofline_is_weights_and_cache_over_the_copy_bandwidth(runner: ModelRunner) -> None:
    rows, _ = _run(_sweep(runner, bandwidth=1e9))
    kv_bytes_per_token = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head size, float32
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


def test_the_first_prefill_of_a_chunk_never_counts(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, forward = Counter[int](), runner.forward

    def counted(batch: ForwardBatch) -> LogitsProcessorOutput:
        calls[batch.input_ids.shape[0]] += 1
        return forward(batch)

    monkeypatch.setattr(runner, "forward", counted)
    rows: list[dict[str, Any]] = []
    overrides = QUIET | {"measure.prefill_tokens": [8], "measure.num_warmup": 0}
    sweep_prefill(runner, tiny_config(overrides).measure, 0, rows.append)
    assert calls[8] == rows[0]["num_samples"] + 1


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


def test_eager_steps_are_measured_where_they_are_asked_for(runner: ModelRunner) -> None:
    rows, _ = _run(_sweep(runner, {"measure.eager_batch_sizes": [3]}))
    assert [(row["batch_size"], row["mode"]) for row in rows] == [(2, "graph"), (3, "graph"), (3, "eager")]


def test_a_context_that_the_pool_holds_fewer_requests_of_is_named() -> None:
    pool = {"attention.overcommit": True, "attention.num_pages": 10}
    with tiny_runner(pool) as runner:
        sweep = _sweep(runner, {"measure.batch_sizes": [2, 4], "measure.context_lens": [16, 64, 400]})
        assert sweep.cut_contexts() == {64: 2, 400: 0}


def test_points_are_visited_in_a_random_order_before_the_last_round(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    visits: list[tuple[int, int]] = []
    sample = SizeSweep._sample

    def noted(sweep: SizeSweep, samples: Any, batch: Any, index: int) -> None:
        visits.append((index, samples.point.batch_size))
        sample(sweep, samples, batch, index)

    monkeypatch.setattr(SizeSweep, "_sample", noted)
    sizes = {"measure.batch_sizes": [1, 2, 3, 4], "measure.rounds": 2, "measure.eager_batch_sizes": [4]}
    rows, _ = _run(_sweep(runner, sizes))
    first, last = ([size for index, size in visits if index == at] for at in (0, 1))
    assert last == [1, 2, 3, 4, 4] != first and sorted(first) == last
    assert [row["batch_size"] for row in rows] == last
    assert all(row["replay_round_std"] is not None for row in rows)
