"""The profiler sees the kernels of a real graph, told from the copies around it."""

from __future__ import annotations

from typing import Any

import torch

from harness.size_sweep import SizeSweep
from harness.step_profile import profile_steps
from runners.model_runner import ModelRunner
from tests.harness.tiny import tiny_config as tiny_job
from tests.runners.tiny_runner import tiny_config, tiny_model


def test_each_graph_shows_its_kernels_and_eager_steps_have_none_in_a_graph(device: torch.device) -> None:
    rows: list[dict[str, Any]] = []
    with ModelRunner(tiny_model("cuda"), tiny_config(device="cuda")) as runner:
        assert runner.graph_runner is not None
        num_nodes = {record.capture_size: record.num_nodes for record in runner.graph_runner.capture_records}
        found = profile_steps(runner, 8, 0, rows.extend)
    graphs = [shape for shape in found["graphs"] if shape["mode"] == "graph"]
    assert {shape["batch_size"] for shape in graphs} <= set(num_nodes)
    for shape in graphs:
        nodes = num_nodes[shape["batch_size"]]
        assert shape["num_kernels"] > 5
        assert nodes is None or shape["num_kernels"] <= nodes
        assert 0 < shape["busy_us"] <= shape["span_us"]
    assert any(row["in_graph"] for row in rows if row["mode"] == "graph" and row["kind"] == "kernel")
    assert not any(row["in_graph"] for row in rows if row["mode"] == "eager")
    assert all(row["kind"] in ("kernel", "copy") for row in rows)


def test_a_sweep_on_the_card_has_telemetry_and_costs_little_to_measure(device: torch.device) -> None:
    rows: list[dict[str, Any]] = []
    with ModelRunner(tiny_model("cuda"), tiny_config(device="cuda")) as runner:
        measure = tiny_job(
            {"measure.timeout_s": 0.5, "measure.rounds": 2, "measure.flush_cache": True}
        ).measure
        sweep = SizeSweep(runner, measure, 0, 1e12)
        sweep.run(lambda row, samples: rows.append(row))
    for row in rows:
        assert row["sm_clock_mhz"] and row["power_w"] and row["temperature_c"]
        assert row["energy_mj_per_token"] is None or row["energy_mj_per_token"] > 0
    overhead = sweep.describe()["overhead"]
    assert overhead["measuring_share"] < 0.05, overhead
