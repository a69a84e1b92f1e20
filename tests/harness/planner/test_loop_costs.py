"""A run that measured the scheduler's loop and uneven batches, as `measure=planning` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.planner.contexts import ContextGrid
from harness.planner.cost import CostTable
from harness.planner.cost_source import load_costs
from harness.planner.histogram import BatchHistogram
from harness.planner.problem import capture_problem
from harness.planner.step_times import step_times
from harness.record import JobRecord, Status
from tests.harness.planner.measured_run import CONTEXTS, SIZES, graph_ms, sizes_row, write_run

#: What the made device and host take.
RATE_MS, PADDING_MS, HOST_MS, AFTER_MS, PAIR_MS = 8e-4, 5e-4, 0.3, 0.2, 1e-6
GRID = ContextGrid.up_to(4096)


def host_ms(batch_size: int, previous: str) -> float:
    return HOST_MS + 0.002 * batch_size + (AFTER_MS if previous == "prefill" else 0.0)


def prefill_ms(num_tokens: int, cached: int) -> float:
    return 6.0 + 0.02 * num_tokens + PAIR_MS * num_tokens * cached


def ragged_row(size: int, batch_size: int, place: str, longest: int) -> dict[str, Any]:
    tokens = batch_size * longest if place == "padded" else (batch_size - 1) * 512 + longest
    rows, rate = (size, PADDING_MS) if place == "padded" else (batch_size, RATE_MS)
    replay_ms = graph_ms(size, tokens) + rate * (longest - tokens / rows)
    return {
        "batch_size": batch_size,
        "padded_batch_size": size,
        "mode": "graph",
        "graph_backend": "cuda",
        "place": place,
        "context_len": 512,
        "longest_len": longest,
        "num_kv_tokens": tokens,
        "num_samples": 12,
        "replay_ms_p50": replay_ms,
        "step_ms_p50": replay_ms + 9.0,
        "rel_std": 0.01,
    }


def loop_row(phase: str, **fields: Any) -> dict[str, Any]:
    names = ("batch_size", "num_tokens", "num_cached_tokens")
    return {"moment": "before", "phase": phase, **dict.fromkeys(names, 1), "num_samples": 20} | fields


def write_planning_run(job_dir: Path, round_std: float = 0.0) -> Path:
    run = write_run(job_dir, finish=False)
    record = JobRecord.attach(run)
    (run / "parts" / "sizes.jsonl").unlink()
    noise = {"replay_rel_std": 0.01, "replay_round_std": round_std}
    for context in CONTEXTS:
        for size in SIZES:
            row = sizes_row(size, context, "graph", "cuda")
            device_ms = row["step_ms_p50"]
            # The isolated step is of a host that was slower: nothing is to be read from it.
            record.append("sizes", row | {"replay_ms_p50": device_ms, "step_ms_p50": 3 * device_ms} | noise)
    for size in SIZES[1:]:
        for longest in (1024, 2048):
            for place in ("first", "last"):
                record.append("ragged", ragged_row(size, size, place, longest))
            record.append("ragged", ragged_row(size, size // 2, "padded", longest))
    for batch_size in (1, 32, 64):
        for previous in ("decode", "prefill"):
            for moment, factor in (("before", 0.9), ("after", 1.1)):
                mean_ms = factor * host_ms(batch_size, previous)
                fields = {"previous": previous, "batch_size": batch_size, "host_ms_mean": mean_ms}
                record.append("loop", loop_row("decode", moment=moment, **fields))
    for tokens, cached in ((16, 0), (512, 0), (512, 512), (512, 2048)):
        fields = {"previous": "decode", "pace_ms_mean": prefill_ms(tokens, cached)}
        record.append("loop", loop_row("prefill", num_tokens=tokens, num_cached_tokens=cached, **fields))
    record.finish_all()
    record.update(status=Status.OK)
    record.close()
    return run


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> CostTable:
    return load_costs(write_planning_run(tmp_path_factory.mktemp("planning")))


def test_a_sizes_time_is_the_devices_and_the_hosts_comes_from_the_loop(costs: CostTable) -> None:
    assert costs.graph_ms(8, np.array([8 * 512.0])) == pytest.approx(graph_ms(8, 8 * 512))
    assert costs.host_ms(32) == pytest.approx(host_ms(32, "decode")), "the mean of before and after"
    assert costs.host_ms(48, after_prefill=True) == pytest.approx(host_ms(48, "prefill"))


def test_the_longest_request_and_padding_rows_have_their_measured_rates(costs: CostTable) -> None:
    assert costs.graph_excess.longest_ms(16) == pytest.approx(RATE_MS)
    assert costs.graph_excess.padding_ms(16) == pytest.approx(PADDING_MS)
    few = costs.graph_ms(64, np.array([8 * 2000.0]), 8)
    assert few == pytest.approx(graph_ms(64, 8 * 2000) + PADDING_MS * (2000 - 8 * 2000 / 64))


def test_a_chunk_is_dearer_for_the_context_it_attends_to(costs: CostTable) -> None:
    times = step_times(costs, SIZES, 64, 512, GRID)
    assert times.prefill_ms(512) == pytest.approx(prefill_ms(512, 0))
    assert times.prefill_ms(512, 512 * 1280) == pytest.approx(prefill_ms(512, 1280))
    assert times.prefill_ms(512, 10**9) == pytest.approx(prefill_ms(512, 2048)), "the end value is held"


def test_a_step_is_device_host_longest_request_and_prefill_before(costs: CostTable) -> None:
    times = step_times(costs, SIZES, 64, 512, GRID)
    even, uneven = times.decode_ms(8, 8 * 512), times.decode_ms(8, 8 * 512, longest=1512)
    assert even == pytest.approx(graph_ms(8, 8 * 512) + host_ms(8, "decode"), rel=0.01)
    assert uneven - even == pytest.approx(RATE_MS * 1000, abs=1e-5)
    assert times.decode_ms(8, 8 * 512, after_prefill=True) - even == pytest.approx(AFTER_MS, abs=1e-5)


def test_a_list_is_charged_for_uneven_batches_and_padding(costs: CostTable) -> None:
    batch = BatchHistogram(np.array([8]), np.array([8000.0]), np.array([2.0]), np.array([500.0]))
    problem = capture_problem(costs, batch, [8, 64])
    assert problem.list_ms([8, 64]) == pytest.approx(graph_ms(8, 8000) + RATE_MS * 500)
    padding_ms = PADDING_MS * (1000 - 8000 / 64)
    assert problem.list_ms([64]) == pytest.approx(graph_ms(64, 8000) + RATE_MS * 500 + padding_ms)


def test_rounds_that_differ_widen_the_noise(tmp_path: Path, costs: CostTable) -> None:
    drifted = load_costs(write_planning_run(tmp_path, round_std=0.1))
    assert drifted.graph.points[8].rel_error > 0.07 > 0.01 > costs.graph.points[8].rel_error


def test_verify_names_the_drift(tmp_path: Path) -> None:
    from harness.planner.verify import drift_notes

    notes = "\n".join(drift_notes(write_planning_run(tmp_path, round_std=0.02)))
    assert "standard deviation 2.0% in the median" in notes
    assert "of the host in decode steps from before the replay to after it: median +22.2%" in notes
