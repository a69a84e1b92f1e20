"""Statistics of steps and requests, against the loop that made them and against plain counting."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.clock import CostClock
from harness.floor import Floor
from harness.record import JobRecord
from harness.report.workload_charts import busy_share
from harness.report.workload_rows import (
    MODES,
    Requests,
    Steps,
    binned_quantiles,
    inter_token_gaps,
    read_requests,
    read_steps,
    weighted_quantiles,
)
from harness.scheduler import SchedulerLimits, SchedulerPolicy
from harness.scheduler_loop import run_loop
from harness.workload.base import Workload
from tests.harness.job_folder import NUM_STEPS, write_job
from tests.harness.paged_model import PagedModel


def test_steps_are_read_with_the_phase_as_a_mode(tmp_path: Path) -> None:
    write_job(tmp_path)
    steps = read_steps(tmp_path)
    assert len(steps) == NUM_STEPS
    assert [MODES[code] for code in steps.mode[:4]] == ["prefill", "graph", "graph", "eager"]
    assert len(steps.decode()) == NUM_STEPS * 3 // 4


def test_a_job_without_a_workload_has_no_steps(tmp_path: Path) -> None:
    JobRecord(tmp_path).close()
    assert len(read_steps(tmp_path)) == 0
    assert len(read_requests(tmp_path)) == 0


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_gaps_between_tokens_are_those_of_the_replay(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = 12
    traffic = Workload(
        np.sort(rng.uniform(0, 0.4, count)),
        rng.integers(1, 40, count).astype(np.int32),
        rng.integers(1, 12, count).astype(np.int32),
    )
    limits = SchedulerLimits(
        max_batch_size=4, num_pages=64, page_size=4, prefill_chunk_tokens=16, max_seq_len=64
    )
    step_rows, request_rows = [], []
    clock = CostClock(lambda step, result: 1.0 + step.index % 7)
    summary = run_loop(
        SchedulerPolicy(limits), PagedModel(limits), clock, traffic, step_rows.append, request_rows.append
    ).bench_serve()
    is_prefill = [row["phase"] == "prefill" for row in step_rows]
    steps = Steps(
        np.array([row["clock_ms"] for row in step_rows]),
        np.array([1.0] * len(step_rows)),
        np.array([row["batch_size"] for row in step_rows]),
        np.array([row["batch_size"] for row in step_rows]),
        np.array([MODES.index("prefill" if prefill else "graph") for prefill in is_prefill]),
        np.array([row["num_kv_tokens"] for row in step_rows]),
    )
    requests = Requests(
        np.array([row["sent_s"] * 1e3 + row["ttft_ms"] for row in request_rows]),
        np.array([row["ttft_ms"] for row in request_rows]),
        np.array([np.nan] * count),
        np.array([row["output_len"] for row in request_rows]),
        np.array([row["num_preemptions"] for row in request_rows]),
    )
    gaps, weights = inter_token_gaps(steps, requests)
    assert weights.sum() == sum(row["output_len"] - 1 for row in request_rows)
    if weights.sum():
        assert np.average(gaps, weights=weights) == pytest.approx(summary["mean_itl_ms"], rel=1e-6)
        assert np.median(np.repeat(gaps, weights)) == pytest.approx(summary["median_itl_ms"], rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), min_size=1, max_size=30), st.floats(0.01, 1.0)
)
def test_a_weighted_quantile_is_that_of_the_values_written_out(
    pairs: list[tuple[int, int]], share: float
) -> None:
    values = np.array([value for value, _ in pairs], dtype=np.float64)
    weights = np.array([weight for _, weight in pairs], dtype=np.int64)
    written_out = np.sort(np.repeat(values, weights))
    if len(written_out):
        expected = written_out[max(0, int(np.ceil(share * len(written_out) - 1e-9)) - 1)]
        assert weighted_quantiles(values, weights, np.array([share]))[0] == expected


def test_quantiles_of_a_bin_are_values_of_that_bin_and_nan_where_it_is_empty() -> None:
    bins = np.array([0, 2, 0, 0, 2])
    values = np.array([5, 9, 1, 3, 7])
    low, middle, high = binned_quantiles(values, bins, 4, (0.0, 0.5, 1.0))
    assert low.tolist()[0::2] == [1.0, 7.0]
    assert middle[0] == 3.0
    assert high.tolist()[0::2] == [5.0, 9.0]
    assert np.isnan(middle[[1, 3]]).all()


def test_time_spent_is_shared_between_the_stretches_that_a_step_reaches_into() -> None:
    steps = Steps(
        clock_ms=np.array([4.0, 12.0, 30.0]),
        step_ms=np.array([4.0, 8.0, 5.0]),
        batch_size=np.array([1, 1, 1]),
        padded_batch_size=np.array([1, 1, 1]),
        mode=np.array([MODES.index(mode) for mode in ("graph", "eager", "graph")]),
        num_kv_tokens=np.array([8, 8, 8]),
    )
    edges = np.array([0.0, 10.0, 20.0, 30.0])
    assert busy_share(steps, MODES.index("graph"), edges).tolist() == pytest.approx([0.4, 0.0, 0.5])
    assert busy_share(steps, MODES.index("eager"), edges).tolist() == pytest.approx([0.6, 0.2, 0.0])
    assert busy_share(steps, MODES.index("split"), edges).tolist() == [0.0, 0.0, 0.0]


def test_the_floor_of_a_workload_is_that_of_its_decode_steps() -> None:
    """A prefill step has another floor, which is not known; 1 ms + 0.1 ms a token here."""
    steps = Steps(
        clock_ms=np.array([4.0, 12.0, 30.0]),
        step_ms=np.array([4.0, 8.0, 5.0]),
        batch_size=np.array([1, 1, 1]),
        padded_batch_size=np.array([1, 1, 1]),
        mode=np.array([MODES.index(mode) for mode in ("graph", "prefill", "eager")]),
        num_kv_tokens=np.array([10, 10, 20]),
    )
    assert steps.floor_share(Floor(1000, 100, 1e6)) == pytest.approx((2.0 + 3.0) / 9.0)
