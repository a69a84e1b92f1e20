"""What only a GPU can show of torch.compile: compiled kernels in our graphs, Inductor's graphs, seconds, memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
import yaml

from runners.capture import CaptureRecord
from runners.capture_sizes import capture_sizes
from runners.compile_counts import CompileCounts
from runners.forward_batch import ForwardBatch
from runners.model_runner import ModelRunner, RunnerConfig
from runners.models.loader import LoadedModel, ModelSpec, load_model
from runners.padding import StepPlan
from tests.gpu.test_cuda_graphs import held_bytes
from tests.runners.compiled_runner import compiled_runner, deep_model
from tests.runners.tiny_runner import Requests

CONF = Path(__file__).parents[2] / "conf"
#: Seconds for SGLang's 36 sizes up to 256: compiled, warmed up and captured.
MAX_REGIONAL_S = 60.0


@pytest.fixture(scope="module")
def deep() -> Iterator[LoadedModel]:
    yield deep_model("cuda", num_hidden_layers=3)
    gc.collect()


@pytest.fixture
def few_candidates() -> Iterator[None]:
    """Autotuning compiles two candidates a product, not twenty, where this torch can be told so."""
    inductor: Any = torch._inductor.config
    can_limit = hasattr(inductor.test_configs, "max_mm_configs")
    with inductor.patch({"test_configs.max_mm_configs": 2} if can_limit else {}):
        yield


def logits(runner: ModelRunner, batch: ForwardBatch, plan: StepPlan | None = None) -> torch.Tensor:
    return runner.forward(batch, plan).next_token_logits.clone()


def counts(runner: ModelRunner) -> CompileCounts:
    assert runner.compile_counts is not None
    return runner.compile_counts


def check_steps(runner: ModelRunner, mode: str) -> None:
    """Every batch size, large then small and back: the same as eager, and no wait for the device."""
    requests = Requests(runner)
    for n in (4, 3, 2, 1, 3, 4):
        batch = requests.first(n)
        replayed = logits(runner, batch)
        assert runner.outcome is not None and runner.outcome.mode == mode
        same_shape = logits(runner, batch, StepPlan("eager", runner.outcome.sizes))
        if mode == "graph":
            assert torch.equal(replayed, same_shape)
        torch.testing.assert_close(replayed, same_shape, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(replayed, logits(runner, batch, StepPlan("eager")), rtol=1e-3, atol=1e-3)
    batches = [requests.first(n) for n in (4, 1, 3)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(12):
            runner.forward(batches[step % 3])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    requests.release()


@pytest.mark.parametrize(
    ("mode", "scope", "dynamic", "sizes"),
    [
        ("default", "model", False, (2, 4)),
        ("default", "layer", True, (1, 2, 4)),
        ("max_autotune", "layer", False, (4,)),
        pytest.param("max_autotune", "model", True, (1, 2, 4), marks=pytest.mark.long),
    ],
)
def test_compiled_kernels_are_captured_in_our_graphs(
    deep: LoadedModel, few_candidates: None, mode: str, scope: str, dynamic: bool, sizes: tuple[int, ...]
) -> None:
    settings = {"compile_mode": mode, "compile_scope": scope, "compile_dynamic": dynamic}
    with compiled_runner(deep, device="cuda", capture_sizes=sizes, **settings) as runner:
        check_steps(runner, "graph")
        # One graph with dynamic shapes serves all sizes but 1.
        assert counts(runner) == CompileCounts(num_graphs=2 if dynamic else len(sizes))
        compiled = capture_records(runner)
    with compiled_runner(deep, device="cuda", capture_sizes=sizes, compile_mode="none") as runner:
        eager = capture_records(runner)
    for record, other in zip(compiled, eager, strict=True):
        assert record.compiled and record.graph_backend == "cuda" and record.num_nodes and other.num_nodes
        assert record.compile_s is not None and record.torch_bytes is not None
        assert record.num_nodes < other.num_nodes


def capture_records(runner: ModelRunner) -> list[CaptureRecord]:
    assert runner.graph_runner is not None
    return list(runner.graph_runner.capture_records)


@pytest.mark.parametrize("scope", ["layer", pytest.param("model", marks=pytest.mark.long)])
def test_reduce_overhead_runs_on_graphs_that_inductor_made(deep: LoadedModel, scope: str) -> None:
    settings = {"compile_mode": "reduce_overhead", "compile_scope": scope, "capture_sizes": (2, 4)}
    with compiled_runner(deep, device="cuda", **settings) as runner:
        assert runner.graph_backend == "inductor"
        check_steps(runner, "compiled")
        # No function was left without a CUDA graph: `num_cudagraph_skips` is 0 as well.
        assert counts(runner) == CompileCounts(num_graphs=2)
        batch = Requests(runner).first(3)
        expected = logits(runner, batch)
        assert runner.graph_runner is not None
        runner.graph_runner.poison_padding = True
        torch.testing.assert_close(logits(runner, batch), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mode", ["default", "reduce_overhead"])
def test_closing_a_compiled_runner_returns_its_memory(deep: LoadedModel, mode: str) -> None:
    settings = {"compile_mode": mode, "compile_scope": "layer", "capture_sizes": (4,)}

    def run() -> None:
        with compiled_runner(deep, device="cuda", **settings) as runner:
            runner.forward(Requests(runner).first(3))

    run()
    before = held_bytes()
    run()
    assert held_bytes() <= before


def qwen3_0_6b() -> LoadedModel:
    """Qwen3-0.6B's shape in bf16, random weights."""
    preset = yaml.safe_load((CONF / "model/qwen3_0_6b.yaml").read_text())
    return load_model(ModelSpec("random", dtype="bfloat16", max_seq_len=512, config=preset["config"]), "cuda")


@pytest.mark.long
def test_regional_dynamic_compile_brings_36_sizes_under_a_minute() -> None:
    sizes = capture_sizes("sglang", 256).sizes
    assert len(sizes) == 36
    config = RunnerConfig(
        device="cuda",
        max_batch_size=256,
        max_seq_len=512,
        num_pages=4096,
        capture_sizes=sizes,
        compile_mode="default",
        compile_scope="layer",
        compile_dynamic=True,
    )
    with ModelRunner(qwen3_0_6b(), config) as runner:
        assert runner.graph_runner is not None
        records = runner.graph_runner.capture_records
        seconds = sum((r.compile_s or 0.0) + r.warmup_s + (r.capture_s or 0.0) for r in records)
        requests = Requests(runner, [17, 40, 3, 100, 64, 65, 63, 1, 9])
        for n in (9, 8, 3, 1):
            batch = requests.first(n)
            replayed = logits(runner, batch)
            assert runner.outcome is not None and runner.outcome.mode == "graph"
            same_shape = logits(runner, batch, StepPlan("eager", runner.outcome.sizes))
            torch.testing.assert_close(replayed, same_shape, rtol=2e-2, atol=2e-2)
        assert counts(runner) == CompileCounts(num_graphs=2)
        assert all(record.compiled for record in records)
        assert seconds < MAX_REGIONAL_S
