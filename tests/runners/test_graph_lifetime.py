"""How long a graph runner is good: stale pointers, aliasing, a failed capture, shutdown."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from runners.cuda_graph_runner import (
    CudaGraphRunner,
    get_global_graph_memory_pool,
    is_capture_mode,
)
from runners.errors import (
    CaptureError,
    CaptureOutOfMemoryError,
    NullPageError,
    RunnerError,
    StaleGraphError,
)
from runners.forward_batch import ForwardBatch
from runners.input_buffers import InputBuffers
from runners.model_runner import ModelRunner
from tests.runners.tiny_runner import (
    EAGER,
    Requests,
    assert_same_tokens,
    graphs_of,
    logits,
    tiny_config,
    tiny_model,
    tiny_runner,
)

# --- contract 6: stale pointers --------------------------------------------------------------------


def replace_pool(runner: ModelRunner) -> None:
    runner.kv.resize(runner.kv.num_pages)


def replace_one_cache(runner: ModelRunner) -> None:
    first, second = runner.kv.v_cache
    runner.kv.v_cache = (first, second.clone())


def replace_storage(runner: ModelRunner) -> None:
    runner.kv.k_cache[0].data = runner.kv.k_cache[0].clone()


def replace_buffers(runner: ModelRunner) -> None:
    graphs_of(runner).buffers = InputBuffers(8, 1, runner.device)


def replace_attention_state(runner: ModelRunner) -> None:
    runner.attn_backend.init_cuda_graph_state(8, 8)


@pytest.mark.parametrize(
    "replace", [replace_pool, replace_one_cache, replace_storage, replace_buffers, replace_attention_state]
)
def test_a_replay_after_a_static_tensor_was_replaced_is_refused(runner: ModelRunner, replace: Any) -> None:
    kept = [*runner.kv.k_cache, *runner.kv.v_cache, graphs_of(runner).buffers.packed]
    kept += runner.attn_backend.captured_tensors().values()  # so that no address is used again
    replace(runner)

    with pytest.raises(StaleGraphError, match="replaced since the capture"):
        runner.forward(ForwardBatch.idle())


def test_graphs_are_stale_while_another_runner_has_bound_its_cache_to_the_model(runner: ModelRunner) -> None:
    with tiny_runner(), pytest.raises(StaleGraphError, match="the cache bound to the model"):
        runner.forward(ForwardBatch.idle())


def test_graphs_are_stale_after_another_runner_has_taken_its_cache_out_of_the_model(
    runner: ModelRunner,
) -> None:
    with tiny_runner():
        pass
    with pytest.raises(StaleGraphError, match="the cache bound to the model"):
        runner.forward(ForwardBatch.idle())


@pytest.mark.parametrize(
    "replace", [replace_pool, replace_one_cache, replace_buffers, replace_attention_state]
)
def test_a_replaced_tensor_is_refused_before_the_launch(runner: ModelRunner, replace: Any) -> None:
    def launch() -> None:
        raise AssertionError("launched")

    replace(runner)
    for graph in graphs_of(runner).graphs.values():
        graph.replay = launch  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(StaleGraphError):
            runner.forward(ForwardBatch.idle())


def test_capturing_again_makes_a_stale_runner_fresh(runner: ModelRunner) -> None:
    kept = graphs_of(runner).buffers
    replace_buffers(runner)
    graphs_of(runner).capture()

    batch = Requests(runner).first(3)
    assert_same_tokens(logits(runner, batch), logits(runner, batch, EAGER))
    assert len(graphs_of(runner).capture_records) == 4
    del kept


# --- contract 7: aliasing --------------------------------------------------------------------------


def test_returned_logits_are_a_view_until_the_next_replay_of_any_graph(runner: ModelRunner) -> None:
    requests = Requests(runner)
    returned = runner.forward(requests.first(2)).next_token_logits
    kept = returned.clone()
    runner.forward(requests.batch(4, 5, 6))

    assert returned.data_ptr() == graphs_of(runner).output_buffers[8].next_token_logits.data_ptr()
    assert not torch.equal(returned, kept)


def test_copy_output_returns_logits_that_later_replays_leave_alone() -> None:
    with tiny_runner(copy_output=True) as runner:
        requests = Requests(runner)
        returned = runner.forward(requests.first(2)).next_token_logits
        kept = returned.clone()
        runner.forward(requests.batch(4, 5, 6))

        assert torch.equal(returned, kept)


# --- contract 8: a failed capture ------------------------------------------------------------------


class FailingRunner(ModelRunner):
    """Fails while size 2 is captured."""

    error: BaseException = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 4.00 KiB. of which 1.00 KiB is free."
    )
    cache: weakref.ref[torch.Tensor]

    def compute_logits(self, batch: ForwardBatch) -> torch.Tensor:
        FailingRunner.cache = weakref.ref(self.kv.k_cache[0])
        if batch.batch_size == 2:
            raise self.error
        return super().compute_logits(batch)


class BrokenRunner(FailingRunner):
    error = RuntimeError("operation not permitted when stream is capturing")


class InterruptedRunner(FailingRunner):
    error = KeyboardInterrupt()


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        (FailingRunner, CaptureOutOfMemoryError),
        (BrokenRunner, CaptureError),
        (InterruptedRunner, KeyboardInterrupt),
    ],
)
def test_a_failed_capture_leaves_nothing_behind_and_the_process_captures_again(
    failing: type[FailingRunner], expected: type[BaseException]
) -> None:
    with pytest.raises(expected):
        failing(tiny_model(), tiny_config())

    assert get_global_graph_memory_pool() is None
    assert not is_capture_mode()
    assert gc.isenabled()
    assert failing.cache() is None, "the KV pool of the failed runner is gone"
    with tiny_runner() as runner:
        batch = Requests(runner).first(3)
        assert_same_tokens(logits(runner, batch), logits(runner, batch, EAGER))


def test_an_out_of_memory_names_the_size_reached_and_the_bytes_missing() -> None:
    with pytest.raises(CaptureOutOfMemoryError, match="capture of size 2 ran out of memory") as caught:
        FailingRunner(tiny_model(), tiny_config())

    assert (caught.value.capture_size, caught.value.missing_bytes) == (2, 3072)


def test_a_capture_that_poisons_the_null_page_is_refused() -> None:
    class Poisoning(ModelRunner):
        def compute_logits(self, batch: ForwardBatch) -> torch.Tensor:
            self.kv.k_cache[0][0].fill_(float("nan"))
            return super().compute_logits(batch)

    with pytest.raises(NullPageError):
        Poisoning(tiny_model(), tiny_config())
    assert get_global_graph_memory_pool() is None


# --- contract 9: shutdown --------------------------------------------------------------------------


def test_shutdown_frees_graphs_and_outputs_and_is_final() -> None:
    with tiny_runner() as runner:
        graphs = graphs_of(runner)
        output = weakref.ref(graphs.output_buffers[8].next_token_logits)
        batch = Requests(runner).first(2)
        runner.forward(batch)
        graphs.shutdown()
        graphs.shutdown()

        assert graphs.graphs == {} and output() is None
        assert not graphs.can_run(batch)
        with pytest.raises(RunnerError, match="shut down"):
            graphs.replay(batch)
        with pytest.raises(RunnerError, match="shut down"):
            graphs.capture()
        assert len(graphs.capture_records) == 4, "what was measured stays readable"


def test_the_pool_handle_goes_with_the_last_runner() -> None:
    first, second = tiny_runner(), tiny_runner()
    assert get_global_graph_memory_pool() is not None
    first.close()
    assert get_global_graph_memory_pool() is not None
    second.close()
    assert get_global_graph_memory_pool() is None


def test_the_runner_is_a_context_manager() -> None:
    with tiny_runner(kind="eager") as model_runner:
        object.__setattr__(model_runner.config, "kind", "cuda_graph")
        with CudaGraphRunner(model_runner) as graphs:
            assert graphs.can_run(ForwardBatch.idle())
        assert graphs.graphs == {}
