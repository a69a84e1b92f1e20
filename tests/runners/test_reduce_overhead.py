"""Inductor's own graphs: none of ours, and said so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from runners.compile_counts import CompileCounts
from runners.errors import RunnerError
from runners.forward_batch import ForwardBatch
from runners.model_runner import ModelRunner
from runners.models.context import num_eager_layers
from runners.padding import StepPlan
from tests.runners.compiled_runner import (
    NUM_LAYERS,
    compiled_runner,
    counts,
    run_steps,
    trace_only,
)
from tests.runners.tiny_runner import Requests, logits, tiny_model


@pytest.fixture(scope="module")
def inductor_graphs() -> Iterator[ModelRunner]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        trace_only(monkeypatch)
        runner = compiled_runner(compile_mode="reduce_overhead", compile_scope="layer")
    with runner:
        yield runner


def test_reduce_overhead_has_no_graphs_of_ours_and_says_compiled(inductor_graphs: ModelRunner) -> None:
    runner, graphs = inductor_graphs, inductor_graphs.graph_runner
    assert graphs is not None and graphs.graphs == {} and graphs.output_buffers == {}
    assert runner.graph_backend == graphs.graph_backend == "inductor"
    requests = Requests(runner)
    for n, size in ((4, 4), (3, 4), (1, 1)):
        batch = requests.first(n)
        assert not graphs.can_run(batch)
        assert logits(runner, batch).shape == (n, runner.vocab_size)
        assert runner.outcome is not None
        assert (runner.outcome.mode, runner.outcome.sizes, runner.outcome.num_graphs) == (
            "compiled",
            (size,),
            0,
        )
        assert runner.is_compiled(StepPlan("compiled", (size,)))
    requests.release()
    run_steps(runner)
    assert logits(runner, ForwardBatch.idle()).shape == (0, runner.vocab_size)
    assert counts(runner) == CompileCounts(num_graphs=3)


def test_reduce_overhead_records_no_capture_time(inductor_graphs: ModelRunner) -> None:
    assert inductor_graphs.graph_runner is not None
    for record in inductor_graphs.graph_runner.capture_records:
        assert record.compiled and record.graph_backend == "inductor"
        assert record.compile_s is not None and record.warmup_s > 0
        assert record.capture_s is None and record.num_nodes is None


def test_reduce_overhead_is_compared_with_uncompiled_code_and_refuses_graphs_of_ours(
    inductor_graphs: ModelRunner,
) -> None:
    runner, requests = inductor_graphs, Requests(inductor_graphs)
    batch = requests.first(3)
    before = num_eager_layers()
    logits(runner, batch, StepPlan("eager", (4,)))
    assert runner.outcome is not None and runner.outcome.mode == "eager"
    assert num_eager_layers() - before == NUM_LAYERS
    with pytest.raises(RunnerError, match=r"sizes \[4\] are not captured"):
        runner.forward(batch, StepPlan("graph", (4,)))
    with pytest.raises(RunnerError, match=r"sizes \[3\] are not compiled, only \[1, 2, 4\]"):
        runner.forward(batch, StepPlan("compiled", (3,)))
    requests.release()


def test_reduce_overhead_keeps_to_real_rows_when_the_padding_is_poisoned(
    inductor_graphs: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, requests = inductor_graphs, Requests(inductor_graphs)
    batch = requests.first(3)
    expected = logits(runner, batch)
    monkeypatch.setattr(runner.graph_runner, "poison_padding", True)
    assert torch.equal(logits(runner, batch), expected)
    requests.release()


def test_on_a_cpu_inductor_says_that_it_made_no_cuda_graphs() -> None:
    settings = {"compile_mode": "reduce_overhead", "capture_sizes": (4,)}
    with compiled_runner(tiny_model(), **settings) as runner:
        run_steps(runner)
        assert counts(runner).num_cudagraph_skips == 1
        assert "Inductor's CUDA graphs" in (counts(runner).warning or "")
