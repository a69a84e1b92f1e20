"""What only a GPU can show of the graph runner: captures that fail, other threads, memory, nodes."""

from __future__ import annotations

import gc
import threading
from abc import ABC, abstractmethod
from pathlib import Path

import pytest
import torch

from runners.cuda_graph_runner import get_global_graph_memory_pool
from runners.errors import CaptureError, CaptureOutOfMemoryError, StaleGraphError
from runners.forward_batch import ForwardBatch
from runners.graph_backend import CudaGraph, side_stream
from runners.input_buffers import InputBuffers
from runners.model_runner import ModelRunner
from runners.padding import StepPlan
from tests.runners.tiny_runner import Requests, tiny_config, tiny_model, tiny_runner


def replayed(runner: ModelRunner, batch: ForwardBatch, plan: StepPlan | None = None) -> torch.Tensor:
    return runner.forward(batch, plan).next_token_logits.clone()


@pytest.mark.parametrize("poison", [False, True])
def test_replay_equals_eager_at_the_same_shape_bit_for_bit(poison: bool) -> None:
    with tiny_runner(device="cuda", poison_padding=poison) as runner:
        requests = Requests(runner)
        for n in (8, 7, 5, 3, 2, 1):
            batch = requests.first(n)
            graph = replayed(runner, batch)
            assert runner.outcome is not None and runner.outcome.mode == "graph"
            eager = replayed(runner, batch, StepPlan("eager", runner.outcome.sizes))
            assert torch.equal(graph, eager)
            torch.testing.assert_close(
                graph, replayed(runner, batch, StepPlan("eager")), rtol=1e-3, atol=1e-3
            )
        split = replayed(runner, requests.first(7), StepPlan("split", (4, 2, 1)))
        torch.testing.assert_close(split, replayed(runner, requests.first(7)), rtol=1e-3, atol=1e-3)


def test_records_say_what_each_size_cost_and_largest_first_shares_the_pool() -> None:
    with tiny_runner(device="cuda") as runner:
        assert runner.graph_runner is not None and runner.graph_backend == "cuda"
        records = runner.graph_runner.capture_records
        assert all(record.num_nodes is not None and record.num_nodes > 0 for record in records)
        first, *others = [record.pool_bytes for record in records]
        assert first is not None and first > 0
        assert others == [0, 0, 0]
        assert all(record.torch_bytes is not None and record.pinned_bytes is not None for record in records)


def test_a_replay_never_waits_for_the_device() -> None:
    with tiny_runner(device="cuda") as runner:
        requests = Requests(runner)
        batches = [requests.first(n) for n in (8, 3, 5, 1)]
        runner.forward(batches[0])
        torch.cuda.set_sync_debug_mode("error")
        try:
            for step in range(50):
                runner.forward(batches[step % 4])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert runner.graph_runner is not None
        assert {mode for mode, _ in runner.graph_runner.outcome_counts} == {"graph"}


def test_another_thread_may_use_the_device_during_a_capture() -> None:
    stop, device = threading.Event(), torch.device("cuda", 0)

    def allocate() -> None:
        while not stop.is_set():
            torch.empty(2**22, device=device).fill_(1.0)
            torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        with tiny_runner(device="cuda") as runner:
            batch = Requests(runner).first(3)
            assert replayed(runner, batch).isfinite().all()
    finally:
        stop.set()
        thread.join()


class FailsAtTwo(ModelRunner, ABC):
    @abstractmethod
    def fail(self) -> None: ...

    def compute_logits(self, batch: ForwardBatch) -> torch.Tensor:
        if batch.batch_size == 2 and torch.cuda.is_current_stream_capturing():
            self.fail()
        return super().compute_logits(batch)


class OutOfMemory(FailsAtTwo):
    def fail(self) -> None:
        torch.empty(2**45, device=self.device)


class Synchronizes(FailsAtTwo):
    def fail(self) -> None:
        torch.ones(1, device=self.device).item()


class RaisesInPython(FailsAtTwo):
    def fail(self) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("failing", "expected"),
    [(OutOfMemory, CaptureOutOfMemoryError), (Synchronizes, CaptureError), (RaisesInPython, CaptureError)],
)
def test_a_failed_capture_leaves_nothing_behind_and_the_process_captures_again(
    failing: type[ModelRunner], expected: type[CaptureError]
) -> None:
    with tiny_runner(device="cuda"):
        pass
    before = held_bytes()
    with pytest.raises(expected) as caught:
        failing(tiny_model("cuda"), tiny_config(device="cuda"))
    if expected is CaptureOutOfMemoryError:
        assert isinstance(caught.value, CaptureOutOfMemoryError)
        assert caught.value.capture_size == 2 and (caught.value.missing_bytes or 0) > 2**40
    del caught

    assert get_global_graph_memory_pool() is None
    assert not torch.cuda.is_current_stream_capturing()
    assert held_bytes() <= before
    with tiny_runner(device="cuda") as runner:
        batch = Requests(runner).first(3)
        graph = replayed(runner, batch)
        assert torch.equal(graph, replayed(runner, batch, StepPlan("eager", (4,))))
    assert held_bytes() <= before


class Hoards(ModelRunner):
    """Size 4 needs half a GiB of temporary memory more than the others."""

    def compute_logits(self, batch: ForwardBatch) -> torch.Tensor:
        logits = super().compute_logits(batch)
        if batch.batch_size == 4:
            logits = logits + torch.zeros(2**27, device=self.device)[0]
        return logits


def test_a_size_that_the_memory_left_cannot_hold_is_named_with_what_is_missing() -> None:
    with tiny_runner(device="cuda"):
        pass
    before = held_bytes()
    left = before + 200 * 2**20  # workspaces of two streams, and the graph of size 8
    torch.cuda.set_per_process_memory_fraction(left / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.raises(
            CaptureOutOfMemoryError, match="the capture of size 4 ran out of memory"
        ) as caught:
            Hoards(tiny_model("cuda"), tiny_config(device="cuda"))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert caught.value.capture_size == 4 and (caught.value.missing_bytes or 0) > 2**27
    del caught

    assert get_global_graph_memory_pool() is None
    assert held_bytes() <= before
    with tiny_runner(device="cuda") as runner:
        assert replayed(runner, Requests(runner).first(3)).isfinite().all()


@pytest.mark.parametrize("what", ["pool", "one cache", "storage", "inputs"])
def test_a_replay_after_memory_was_replaced_is_refused(what: str) -> None:
    with tiny_runner(device="cuda") as runner:
        assert runner.graph_runner is not None
        kept = [*runner.kv.k_cache, *runner.kv.v_cache, runner.graph_runner.buffers.packed]
        if what == "pool":
            runner.kv.resize(runner.kv.num_pages)
        elif what == "one cache":
            first, second = runner.kv.v_cache
            runner.kv.v_cache = (first, second.clone())
        elif what == "storage":
            runner.kv.k_cache[0].data = runner.kv.k_cache[0].clone()
        else:
            runner.graph_runner.buffers = InputBuffers(8, 1, runner.device)
        with pytest.raises(StaleGraphError, match="replaced since the capture"):
            runner.forward(ForwardBatch.idle())
        del kept


def held_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_shutdown_returns_the_memory_of_the_graphs() -> None:
    with tiny_runner(device="cuda", kind="eager", capture_sizes=()) as runner:
        runner.forward(Requests(runner).first(3))  # one warm eager step: its kernels stay loaded
    before = held_bytes()
    with tiny_runner(device="cuda") as runner:
        runner.forward(Requests(runner).first(3))
        assert torch.cuda.memory_reserved() > before
    assert held_bytes() <= before


def test_a_graph_can_be_dumped(tmp_path: Path) -> None:
    with tiny_runner(device="cuda", graph_dump_dir=str(tmp_path), capture_sizes=(8,)):
        assert (tmp_path / "decode_8.dot").read_text().startswith("digraph")


def test_memory_of_a_graph_comes_from_the_pool_it_was_given() -> None:
    device = torch.device("cuda", 0)
    source = torch.ones(4, device=device)
    target = torch.zeros(4, device=device)
    graph = CudaGraph()
    pool = torch.cuda.graph_pool_handle()
    with side_stream(device):
        graph.capture(lambda: target.copy_(source * 2 + 1), pool)

    source.fill_(5.0)
    graph.replay()
    assert target.tolist() == [11.0] * 4
    assert any(tuple(s["segment_pool_id"]) == tuple(pool) for s in torch.cuda.memory_snapshot())
    graph.reset()
