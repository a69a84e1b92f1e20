"""What a job will need is known before anything is captured, and sizes the pool on a CUDA device."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import ConfigError
from harness.memory import MIB, MemoryBudget, cut_warning, estimate_graph_bytes, fitting_pages, plan_memory
from runners.models.loader import LoadedModel
from runners.runner_config import RunnerConfig

H200 = Path(__file__).parents[2] / "docs/results/h200"
GIB = 1024 * MIB


def budget(**changes: Any) -> MemoryBudget:
    given: dict[str, Any] = {
        **{"weight_bytes": GIB, "num_pages": 1000, "kv_bytes": 1000 * MIB, "logits_bytes": 10 * MIB},
        **{"graph_bytes": 20 * MIB, "workspace_bytes": 30 * MIB, "overhead_bytes": 40 * MIB},
    }
    return MemoryBudget(**(given | {"free_bytes": 2 * GIB} | changes))


def test_the_whole_batch_gets_its_pages_where_they_fit() -> None:
    assert fitting_pages(budget(), MIB, fewest=10, memory_fraction=0.9) == 1000


def test_else_the_pool_takes_the_fraction_less_the_graphs_and_all_the_rest() -> None:
    assert fitting_pages(budget(free_bytes=1000 * MIB), MIB, fewest=10, memory_fraction=0.5) == 400


def test_what_measuring_takes_is_left_out_of_the_pool() -> None:
    made = budget(free_bytes=1000 * MIB, measure_bytes=100 * MIB)
    assert fitting_pages(made, MIB, fewest=10, memory_fraction=0.5) == 300


def test_one_request_at_full_length_is_the_least_and_is_refused_if_even_that_has_no_room() -> None:
    short = budget(free_bytes=150 * MIB)
    pages = fitting_pages(short, MIB, fewest=65, memory_fraction=0.9)
    assert pages == 65
    with pytest.raises(ConfigError, match=r"need 165 MiB.*150 MiB are free.*attention.num_pages"):
        replace(short, num_pages=pages, kv_bytes=pages * MIB).check()


@given(st.integers(0, 4000), st.floats(0.1, 1.0), st.integers(2, 900))
def test_a_pool_never_leaves_its_bounds_and_never_exceeds_the_fraction_above_the_least(
    free_mib: int, fraction: float, fewest: int
) -> None:
    made = budget(free_bytes=free_mib * MIB)
    pages = fitting_pages(made, MIB, fewest, fraction)
    assert fewest <= pages <= made.num_pages
    assert pages == fewest or pages * MIB + made.other_bytes <= free_mib * MIB * fraction


def test_a_cut_pool_is_warned_about(tiny: LoadedModel) -> None:
    config = RunnerConfig(device="cpu", max_batch_size=8, max_seq_len=64, capture_sizes=(8,))
    assert cut_warning(budget(num_pages=33), config, 0.9) is None
    assert "holds 20 pages, not the 33 of 8 requests" in str(cut_warning(budget(num_pages=20), config, 0.9))


def test_a_cpu_keeps_the_whole_pool_and_counts_no_graphs_executable(tiny: LoadedModel) -> None:
    config = RunnerConfig(device="cpu", max_batch_size=8, max_seq_len=64, capture_sizes=(8,))
    made = plan_memory(tiny, config, torch.device("cpu"), memory_fraction=1e-6)
    assert (made.num_pages, made.workspace_bytes, made.overhead_bytes) == (33, 0, 0)
    assert made.graph_bytes == 8 * tiny.vocab_size * 4


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    from tests.runners.tiny_runner import tiny_model

    return tiny_model()


# --- against what an H200 measured -------------------------------------------------------------

INTERMEDIATE = {"qwen3_0_6b": 3072, "qwen3_8b": 12288}


def recorded(job: str) -> tuple[LoadedModel, RunnerConfig, int]:
    """A committed job: its model and runner as far as the estimate asks, and the bytes its captures took."""
    result = json.loads((H200 / job / "result.json").read_text())
    with (H200 / job / "capture.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    model, compiled = result["model"], rows[0]["compiled"] == "true"
    loaded = object.__new__(LoadedModel)
    config = type(
        "Config",
        (),
        {"intermediate_size": INTERMEDIATE[job.removesuffix("_compiled").removesuffix("_fused")]},
    )
    vars(loaded).update(
        hf_config=config(),
        dtype=torch.bfloat16,
        vocab_size=model["vocab_size"],
        implementation=model["implementation"],
        layers=[0] * model["num_layers"],
    )
    runner = RunnerConfig(
        device="cuda",
        max_batch_size=256,
        max_seq_len=1024,
        capture_sizes=tuple(int(row["capture_size"]) for row in rows),
        compile_mode="default" if compiled else "none",
        compile_scope="layer",
    )
    classes = ("pool_bytes", "torch_bytes", "device_bytes")
    measured = sum(int(row[name]) for row in rows for name in classes)
    logits = 256 * model["vocab_size"] * torch.bfloat16.itemsize
    if int(rows[0]["torch_bytes"]) < logits:  # they lie in the block that the eager step left
        measured += logits
    return loaded, runner, measured


@pytest.mark.parametrize(
    "job", ["qwen3_0_6b", "qwen3_0_6b_compiled", "qwen3_0_6b_fused", "qwen3_8b", "qwen3_8b_fused"]
)
def test_the_estimate_is_near_what_an_h200_measured(job: str) -> None:
    """Of an earlier version is qwen3_8b: its captures had a cuBLAS workspace of their own."""
    loaded, runner, measured = recorded(job)
    assert 0.8 * measured <= estimate_graph_bytes(loaded, runner) <= 1.6 * measured


def test_nothing_is_estimated_where_nothing_is_captured() -> None:
    loaded, runner, _ = recorded("qwen3_0_6b")
    assert estimate_graph_bytes(loaded, replace(runner, kind="eager", capture_sizes=())) == 0
