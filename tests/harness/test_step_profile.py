"""Kernels, copies and gaps read from a profiler's events: those of a GPU as CUPTI reports a replay."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

from harness.record import PROFILE_COLUMNS
from harness.step_profile import kernel_rows, kernels_by_step, operator_rows, profile_steps, shape_of
from tests.harness.tiny import tiny_runner

STEP = "cudagraph_harness::decode_step"


@dataclass
class Event:
    name: str
    start_us: float
    us: float
    id: int = 0
    device_type: Any = DeviceType.CUDA
    self_cpu_time_total: float = 0.0
    time_range: Any = field(init=False)

    def __post_init__(self) -> None:
        self.time_range = SimpleNamespace(start=self.start_us, end=self.start_us + self.us)


def host(name: str, start_us: float, us: float, id: int = 0, own_us: float = 0.0) -> Event:
    return Event(name, start_us, us, id, DeviceType.CPU, own_us)


def replay(start_us: float, launch: int) -> list[Event]:
    """A step: a copy in, a graph of three kernels of which the last two overlap, a copy out."""
    return [
        host(STEP, start_us, 100.0),
        host("cudaGraphLaunch", start_us + 10, 5.0, id=launch),
        host("cudaMemcpyAsync", start_us + 2, 5.0, id=launch + 1),
        Event(STEP, start_us + 12, 60.0),  # the profiler repeats the mark on the device
        Event("Memcpy HtoD (Pinned -> Device)", start_us + 12, 2.0, id=launch + 1),
        Event("gemm", start_us + 20, 10.0, id=launch),
        Event("attention", start_us + 34, 6.0, id=launch),
        Event("gemm", start_us + 38, 12.0, id=launch),
        Event("Memcpy DtoH (Device -> Pinned)", start_us + 60, 1.0, id=launch + 2),
    ]


EVENTS = [*replay(0.0, 100), *replay(1000.0, 200)]


def test_the_kernels_of_a_replay_are_told_from_what_lies_around_it() -> None:
    steps = kernels_by_step(EVENTS)
    assert [[kernel.name for kernel in step if kernel.in_graph] for step in steps] == [
        ["gemm", "attention", "gemm"]
    ] * 2
    assert [sum(not kernel.in_graph for kernel in step) for step in steps] == [2, 2]


def test_gaps_are_what_no_kernel_runs_in_and_overlaps_count_once() -> None:
    assert shape_of(kernels_by_step(EVENTS)) == {
        "num_kernels": 3,
        "num_outside": 2,
        "kernel_us": 28.0,
        "busy_us": 26.0,
        "span_us": 30.0,
        "gap_us": 4.0,
        "longest_gap_us": 4.0,
    }


def test_without_a_graph_the_gaps_are_those_of_the_whole_step() -> None:
    events = [event for event in EVENTS if event.name != "cudaGraphLaunch"]
    shape = shape_of(kernels_by_step(events))
    assert (shape["num_kernels"], shape["num_outside"], shape["span_us"]) == (5, 0, 49.0)


def test_rows_hold_calls_and_time_a_step_the_longest_first() -> None:
    rows = kernel_rows(kernels_by_step(EVENTS))
    assert [
        (row["name"], row["num_calls"], row["time_us"], row["kind"], row["in_graph"]) for row in rows[:3]
    ] == [
        ("gemm", 2.0, 22.0, "kernel", True),
        ("attention", 1.0, 6.0, "kernel", True),
        ("Memcpy HtoD (Pinned -> Device)", 1.0, 2.0, "copy", False),
    ]
    assert sum(row["share"] for row in rows) == pytest.approx(1.0)


def test_operators_count_by_their_own_time() -> None:
    events = [host(STEP, 0, 100.0, own_us=5.0), host("aten::mm", 1, 40.0, own_us=40.0)]
    events += [host("aten::linear", 1, 50.0, own_us=10.0), host("aten::mm", 60, 20.0, own_us=20.0)]
    rows = operator_rows(events)
    assert [(row["name"], row["num_calls"], row["time_us"]) for row in rows] == [
        ("aten::mm", 2.0, 60.0),
        ("aten::linear", 1.0, 10.0),
    ]


def test_emulated_graphs_show_the_operators_of_each_size_and_of_eager() -> None:
    rows: list[dict[str, Any]] = []
    with tiny_runner({"model.config.num_hidden_layers": 1}) as runner:
        free = runner.kv.num_free_pages
        found = profile_steps(runner, 24, 0, rows.extend)
        assert runner.kv.num_free_pages == free
    points = [(shape["batch_size"], shape["mode"], shape["graph_backend"]) for shape in found["graphs"]]
    assert points == [(2, "graph", "emulated"), (4, "graph", "emulated"), (4, "eager", "none")]
    assert all(shape["num_kernels"] is None and shape["gap_us"] is None for shape in found["graphs"])
    assert all(row.keys() == PROFILE_COLUMNS.keys() for row in rows)
    products = [row for row in rows if row["name"] in ("aten::mm", "aten::addmm", "aten::bmm")]
    assert {row["batch_size"] for row in products} == {2, 4}
    assert all(row["kind"] == "operator" and row["num_calls"] >= 1 for row in products)
