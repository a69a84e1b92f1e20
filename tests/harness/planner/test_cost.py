from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.errors import ConfigError
from harness.planner import cost_source
from harness.planner.capture_cost import CaptureCosts
from harness.planner.cost_source import load_costs
from harness.planner.surface import StepSurface
from harness.record import JobRecord
from tests.harness.planner.measured_run import (
    CONTEXTS,
    SIZES,
    capture_row,
    eager_ms,
    graph_ms,
    prefill_ms,
    sizes_row,
    write_run,
)


def at(*tokens: float) -> np.ndarray:
    return np.array(tokens, dtype=np.float64)


def test_measured_points_are_read_as_they_were_measured(tmp_path: Path) -> None:
    costs = load_costs(write_run(tmp_path))
    for size in SIZES:
        tokens = at(*(size * context for context in CONTEXTS))
        assert costs.graph_ms(size, tokens) == pytest.approx([graph_ms(size, t) for t in tokens])
        assert costs.eager_ms(size, tokens) == pytest.approx([eager_ms(size, t) for t in tokens])


def test_between_kv_tokens_the_time_is_linear_and_beyond_them_held() -> None:
    rows = [sizes_row(8, context, "graph", "cuda") for context in (100, 200)]
    surface = StepSurface.from_rows(rows, "graph")
    low, middle, high = surface.step_ms(8, at(800, 1200, 1600))
    assert middle == pytest.approx((low + high) / 2)
    assert surface.step_ms(8, at(1, 9999)) == pytest.approx([low, high])
    assert surface.is_beyond(8, at(799, 800, 1600, 1601)).tolist() == [False, False, False, True]


def test_a_size_between_measured_ones_takes_their_times_at_its_own_context() -> None:
    rows = [sizes_row(size, context, "graph", "cuda") for size in (8, 16) for context in (100, 200)]
    surface = StepSurface.from_rows(rows, "graph")
    assert surface.neighbours(10) == ((8, 0.75), (16, 0.25))
    expected = 0.75 * graph_ms(8, 8 * 150) + 0.25 * graph_ms(16, 16 * 150)
    assert surface.step_ms(10, at(10 * 150)) == pytest.approx([expected])
    assert not surface.is_measured(10) and surface.covers(10) and not surface.covers(17)


def test_off_size_batches_add_points_of_fewer_kv_tokens() -> None:
    on = sizes_row(8, 100, "graph", "cuda")
    off = on | {"batch_size": 5, "num_kv_tokens": 500, "step_ms_p50": 3.0}
    surface = StepSurface.from_rows([on, off], "graph")
    assert surface.step_ms(8, at(500)) == pytest.approx([3.0])


def test_rows_without_a_time_are_no_measurement() -> None:
    surface = StepSurface.from_rows([sizes_row(8, 100, "graph", "cuda") | {"step_ms_p50": None}], "graph")
    assert not surface


def test_where_the_card_was_throttled_throughout_the_steps_in_a_row_give_the_devices_time() -> None:
    measured = sizes_row(4, 100, "graph", "cuda") | {"replay_ms_p50": 5.0, "replay_rel_std": 0.02}
    throttled = sizes_row(8, 100, "graph", "cuda") | {
        "step_ms_p50": None, "replay_ms_p50": None, "replay_rel_std": None, "num_samples": 0, "back_to_back_ms": 6.5,
    }  # fmt: skip
    surface = StepSurface.from_rows([measured, throttled], "graph", "replay_ms_p50")
    assert surface.step_ms(8, at(800)) == [6.5]
    assert surface.points[8].rel_error == surface.points[4].rel_error > 0, "its own noise is not known"
    assert not StepSurface.from_rows([throttled], "graph"), "the host's share of a step is not in them"


def test_the_noise_of_the_samples_is_kept() -> None:
    rows = [sizes_row(8, 100, "graph", "cuda", rel_std=0.05)]
    error = StepSurface.from_rows(rows, "graph").points[8].rel_error
    assert error == pytest.approx(1.2533 * 0.05 / 10)  # 100 samples


def test_prefill_is_linear_between_measured_chunks_and_refused_beyond_them(tmp_path: Path) -> None:
    costs = load_costs(write_run(tmp_path))
    assert costs.prefill_ms(np.array([1, 16, 320, 512])) == pytest.approx(
        [prefill_ms(16), prefill_ms(16), prefill_ms(320), prefill_ms(512)]
    )
    with pytest.raises(ConfigError, match=r"measure\.prefill_tokens"):
        costs.prefill_ms(np.array([513]))


def test_a_size_beyond_the_measured_ones_is_refused(tmp_path: Path) -> None:
    costs = load_costs(write_run(tmp_path))
    with pytest.raises(ConfigError, match="sizes 1 to 64, but not for 65"):
        costs.graph_ms(65, at(65))


def test_emulated_graphs_are_no_source_of_costs(tmp_path: Path) -> None:
    run = write_run(tmp_path, graph_backend="emulated")
    with pytest.raises(ConfigError, match="emulated"):
        load_costs(run, allow_unverified=True)


def test_an_unverified_run_needs_permission_and_is_marked(tmp_path: Path) -> None:
    run = write_run(tmp_path, verified=False)
    with pytest.raises(ConfigError, match="--allow-unverified"):
        load_costs(run)
    costs = load_costs(run, allow_unverified=True)
    assert not costs.source.verified
    assert any("unverified" in warning for warning in costs.source.warnings)


def test_a_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"result\.json"):
        load_costs(tmp_path)


def test_without_a_run_and_without_the_default_record_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_source, "DEFAULT_RUN", tmp_path / "absent")
    with pytest.raises(ConfigError, match="name a job's folder"):
        load_costs(cost_source.DEFAULT_RUN)


def test_a_run_that_was_cut_off_is_read_with_a_warning(tmp_path: Path) -> None:
    costs = load_costs(write_run(tmp_path, finish=False))
    assert costs.graph.sizes == SIZES
    assert any("status running" in warning for warning in costs.source.warnings)


def write_replay(run: Path, clock: str) -> None:
    """Decode steps of 5 ms, between which the host takes 0.1 ms and 0.01 ms a request."""
    record = JobRecord.attach(run)
    clock_ms = 0.0
    for step in range(90):
        batch_size = 1 + step % 3
        clock_ms += 5.0 + 0.1 + 0.01 * batch_size
        record.append(
            "steps",
            {"step": step, "phase": "decode", "batch_size": batch_size, "clock_ms": clock_ms, "step_ms": 5.0},
        )
    record.finish("steps")
    record.update(workload={"clock": clock})


def test_the_hosts_time_between_steps_is_told_from_the_replay(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    write_replay(run, "measured")
    costs = load_costs(run)
    assert costs.host_ms(1) == pytest.approx(0.11, rel=1e-3)
    assert costs.host_ms(64) == pytest.approx(0.74, rel=1e-2)


def test_a_virtual_clock_tells_nothing_of_the_host(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    write_replay(run, "fixed")
    assert load_costs(run).host_ms(64) == 0.0


def test_a_list_is_charged_the_first_capture_once() -> None:
    captures = CaptureCosts.from_rows([capture_row(size, 64, "cuda") for size in (64, 32, 8)])
    assert captures is not None
    assert captures.device_bytes([8, 32, 64]).tolist() == [9 << 20, 9 << 20, 72 << 20]
    assert captures.device_bytes([20, 64]).tolist() == [9 << 20, 72 << 20]
    assert captures.seconds([8, 64]) == pytest.approx([0.15, 0.15])
    assert captures.by_class([8, 64])["pinned_bytes"] == 2 * 4096


def test_blocks_of_the_driver_are_shared_by_the_nodes_that_fill_them() -> None:
    """Of three graphs beside the largest one took a block of 2 MiB; the first of them has twice the nodes."""
    taken = {64: (8 << 20, 200), 32: (0, 200), 16: (2 << 20, 100), 8: (0, 100)}
    rows = [
        capture_row(size, 64, "cuda") | {"device_bytes": num_bytes, "num_nodes": num_nodes}
        for size, (num_bytes, num_nodes) in taken.items()
    ]
    captures = CaptureCosts.from_rows(rows)
    assert captures is not None
    pool = 1 << 20
    assert captures.device_bytes([8, 16, 32, 64]).tolist() == [
        pool + (1 << 19),
        pool + (1 << 19),
        pool + (1 << 20),
        72 << 20,
    ]


def test_a_memory_class_that_was_not_measured_is_named() -> None:
    rows = [capture_row(size, 64, "cuda") | {"device_bytes": None} for size in (64, 32)]
    captures = CaptureCosts.from_rows(rows)
    assert captures is not None
    assert captures.unknown_classes == ["device_bytes"]
    assert captures.device_bytes([32, 64]).tolist() == [1 << 20, 64 << 20]


def test_a_class_that_shrank_meanwhile_counts_as_nothing() -> None:
    rows = [capture_row(64, 64, "cuda"), capture_row(32, 64, "cuda") | {"torch_bytes": -4096}]
    captures = CaptureCosts.from_rows(rows)
    assert captures is not None
    assert captures.device_bytes([32, 64])[0] == 9 << 20


def test_candidates_are_measured_sizes_and_the_maximum(tmp_path: Path) -> None:
    costs = load_costs(write_run(tmp_path))
    assert costs.candidates(20) == [1, 2, 4, 8, 12, 16, 20]
    assert costs.candidates(5, interpolated=True) == [1, 2, 3, 4, 5]
