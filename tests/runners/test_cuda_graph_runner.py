"""The contracts of the graph runner, on a real tiny decoder and the emulated backend."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
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
    NoUsableGraphError,
    NullPageError,
    PlanLayoutError,
    RunnerError,
    StaleGraphError,
)
from runners.forward_batch import ForwardBatch, ForwardMode
from runners.input_buffers import InputBuffers
from runners.model_runner import ModelRunner
from runners.padding import StepCosts, StepPlan
from tests.runners.tiny_runner import Requests, tiny_config, tiny_model, tiny_runner

EAGER = StepPlan("eager")


@pytest.fixture
def runner() -> Iterator[ModelRunner]:
    with tiny_runner() as made:
        yield made


def graphs_of(runner: ModelRunner) -> CudaGraphRunner:
    assert runner.graph_runner is not None
    return runner.graph_runner


def logits(runner: ModelRunner, batch: ForwardBatch, plan: StepPlan | None = None) -> torch.Tensor:
    return runner.forward(batch, plan).next_token_logits.clone()


def assert_same_tokens(values: torch.Tensor, reference: torch.Tensor) -> None:
    """Contract 3b: within a tolerance, and the same top-1 where the top-2 gap is clear."""
    error = (values - reference).abs().max().item()
    assert error < 1e-5
    top2 = reference.topk(2).values
    clear = top2[:, 0] - top2[:, 1] > 4 * error
    assert torch.equal(values.argmax(-1)[clear], reference.argmax(-1)[clear])


# --- capture ---------------------------------------------------------------------------------------


def test_construction_captures_every_size_largest_first(runner: ModelRunner) -> None:
    graphs = graphs_of(runner)

    assert [record.capture_size for record in graphs.capture_records] == [8, 4, 2, 1]
    assert sorted(graphs.graphs) == sorted(graphs.output_buffers) == graphs.capture_bs == [1, 2, 4, 8]
    assert (graphs.max_bs, graphs.seq_len_fill_value) == (8, 1)
    assert (graphs.enable_torch_compile, graphs.torch_compile_max_bs, graphs.compile_bs) == (False, 0, [])


def test_capture_records_say_what_was_measured_and_leave_the_rest_empty(runner: ModelRunner) -> None:
    for record in graphs_of(runner).capture_records:
        assert record.graph_backend == "emulated"
        assert record.warmup_s > 0 and record.capture_s > 0
        unmeasured = (record.compile_s, record.pool_bytes, record.torch_bytes, record.device_bytes)
        assert {*unmeasured, record.pinned_bytes, record.num_nodes} == {None}
        assert record.compiled is False


def test_each_size_is_warmed_up_and_captured_in_a_quiet_process() -> None:
    seen: list[tuple[int, bool, bool]] = []

    class Watched(ModelRunner):
        def compute_logits(self, batch: ForwardBatch) -> torch.Tensor:
            seen.append((batch.batch_size, is_capture_mode(), gc.isenabled()))
            return super().compute_logits(batch)

    progress: list[int] = []
    config = tiny_config(capture_sizes=(2, 4), num_warmup_steps=3)
    with Watched(tiny_model(), config, on_capture=lambda record: progress.append(record.capture_size)):
        assert seen == [(4, True, False)] * 4 + [(2, True, False)] * 4
        assert progress == [4, 2]
    assert gc.isenabled() and not is_capture_mode()


def test_all_sizes_share_one_output_buffer(runner: ModelRunner) -> None:
    outputs = [output.next_token_logits for output in graphs_of(runner).output_buffers.values()]

    assert len({tensor.data_ptr() for tensor in outputs}) == 1
    assert outputs[0].untyped_storage().nbytes() == 8 * runner.vocab_size * 4


def test_the_null_page_is_zero_after_the_capture(runner: ModelRunner) -> None:
    assert all(bool((cache[0] == 0).all()) for cache in (*runner.kv.k_cache, *runner.kv.v_cache))


# --- contract 2: padding rows ----------------------------------------------------------------------


def test_padding_rows_hold_their_fill_after_a_larger_batch(runner: ModelRunner) -> None:
    requests, buffers = Requests(runner), graphs_of(runner).buffers
    runner.forward(requests.first(8))
    runner.forward(requests.first(3))

    for name, fill in buffers.fills.items():
        assert (getattr(buffers, name)[3:] == fill).all(), name


def test_a_smaller_batch_is_not_changed_by_the_larger_one_before_it(runner: ModelRunner) -> None:
    requests = Requests(runner)
    alone = logits(runner, requests.first(3))
    runner.forward(requests.first(8))

    assert torch.equal(logits(runner, requests.first(3)), alone)


def test_a_negative_slot_writes_the_null_page_and_no_other(runner: ModelRunner) -> None:
    requests = Requests(runner)
    batch = requests.first(2)
    batch.out_cache_loc = torch.tensor([-1, int(batch.out_cache_loc[1])])
    pages = runner.kv.num_pages
    before = runner.kv.k_cache[0][pages - 1].clone()

    runner.forward(batch)

    assert torch.equal(runner.kv.k_cache[0][pages - 1], before)
    assert not torch.equal(runner.kv.k_cache[0][0, 0], torch.zeros_like(runner.kv.k_cache[0][0, 0]))


# --- contract 3: parity ----------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", range(1, 9))
def test_replay_equals_eager_at_the_same_shape_and_plan_bit_for_bit(
    runner: ModelRunner, batch_size: int
) -> None:
    batch = Requests(runner).first(batch_size)
    replayed = logits(runner, batch)
    (size,) = runner.outcome.sizes  # type: ignore[union-attr]

    assert torch.equal(replayed, logits(runner, batch, StepPlan("eager", (size,))))


@pytest.mark.parametrize("batch_size", range(1, 9))
def test_every_row_of_a_replay_equals_an_eager_step_that_was_prepared_apart(
    runner: ModelRunner, batch_size: int
) -> None:
    batch = Requests(runner).first(batch_size)
    replayed = logits(runner, batch)

    assert_same_tokens(replayed, logits(runner, batch, EAGER))
    assert_same_tokens(replayed, runner.forward_eager(batch, 8).next_token_logits)


def test_a_replay_without_a_plan_of_its_own_would_be_seen(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Requests(runner).first(8)
    eager = logits(runner, batch, EAGER)
    backend = runner.attn_backend
    fill = torch.ones(8, dtype=torch.int32)
    backend.init_forward_metadata_capture_cuda_graph(8, 8, torch.zeros_like(fill), fill, ForwardMode.DECODE)
    monkeypatch.setattr(backend, "init_forward_metadata_replay_cuda_graph", lambda *arguments: None)

    assert (logits(runner, batch) - eager).abs().max() > 1e-3


def test_decoding_on_across_a_page_edge_matches_eager(runner: ModelRunner) -> None:
    requests = Requests(runner, [3, 6, 11])
    for _ in range(6):
        batch = requests.batch()
        assert_same_tokens(logits(runner, batch), logits(runner, batch, EAGER))
        requests.lengths += 1
        for index, row in enumerate(requests.rows.tolist()):
            assert runner.kv.extend(row, int(requests.lengths[index]))


def test_all_rows_are_finite_padding_rows_included(runner: ModelRunner) -> None:
    runner.forward(Requests(runner).first(5))

    assert graphs_of(runner).output_buffers[8].next_token_logits.isfinite().all()


# --- contract 4: poison ----------------------------------------------------------------------------


def test_poison_does_not_change_a_real_row(runner: ModelRunner) -> None:
    requests = Requests(runner)
    clean = [logits(runner, requests.first(n)) for n in range(1, 9)]
    graphs_of(runner).poison_padding = True

    for n in range(8, 0, -1):
        assert torch.equal(logits(runner, requests.first(n)), clean[n - 1])


def test_poison_puts_nan_into_unallocated_pages_and_tails_of_live_ones() -> None:
    with tiny_runner(poison_padding=True) as runner:
        requests = Requests(runner, [5])
        runner.forward(requests.batch())
        k_cache = runner.kv.k_cache[0]
        free = runner.kv.pool.free_pages()
        last_page = int(runner.kv.page_table_cpu[requests.rows[0], 1])

        assert k_cache[free].isnan().all()
        assert k_cache[last_page, 1:].isnan().all()
        assert k_cache[last_page, 0].isfinite().all()
        assert k_cache[0].isfinite().all()


def test_an_output_row_that_a_replay_does_not_write_is_nan_in_poison_mode(runner: ModelRunner) -> None:
    graphs, requests = graphs_of(runner), Requests(runner)
    runner.forward(requests.first(4))
    graphs.poison_padding = True
    graphs.graphs[4]._step = lambda: None  # type: ignore[attr-defined]

    assert logits(runner, requests.first(4)).isnan().all()


def test_a_poisoned_null_page_is_reported(runner: ModelRunner) -> None:
    graphs_of(runner).poison_padding = True
    runner.kv.v_cache[1][0, 3] = float("nan")

    with pytest.raises(NullPageError, match="V cache of layer 1"):
        runner.forward(Requests(runner).first(3))


def test_backends_that_do_not_mask_the_tail_are_spared_it() -> None:
    with tiny_runner(poison_padding=True) as runner:
        runner.attn_backend.masks_tail = False
        requests = Requests(runner, [5])
        runner.forward(requests.batch())

        last_page = int(runner.kv.page_table_cpu[requests.rows[0], 1])
        assert runner.kv.k_cache[0][last_page].isfinite().all()


# --- contract 5: planning --------------------------------------------------------------------------


def test_attention_is_planned_before_every_replay_with_the_padding_rows(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[tuple[int, list[int], int]] = []
    original = runner.attn_backend.init_forward_metadata_replay_cuda_graph

    def note(bs: int, rows: Any, lens: torch.Tensor, total: int, mode: Any, lens_cpu: torch.Tensor) -> None:
        assert torch.equal(lens, lens_cpu)
        plans.append((bs, lens_cpu.tolist(), total))
        original(bs, rows, lens, total, mode, lens_cpu)

    monkeypatch.setattr(runner.attn_backend, "init_forward_metadata_replay_cuda_graph", note)
    requests = Requests(runner, [5, 4, 17])
    runner.forward(requests.first(3))
    runner.forward(requests.first(2))

    assert plans == [(4, [5, 4, 17, 1], 27), (2, [5, 4], 9)]


def refuse_plan(*arguments: Any) -> None:
    raise PlanLayoutError("another split of the KV")


def test_a_plan_with_another_layout_runs_eager_and_says_so(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Requests(runner).first(3)
    eager = logits(runner, batch, EAGER)
    monkeypatch.setattr(runner.attn_backend, "init_forward_metadata_replay_cuda_graph", refuse_plan)

    with pytest.warns(RuntimeWarning, match="differs in layout"):
        assert torch.equal(logits(runner, batch), eager)
    assert (runner.outcome.mode, runner.outcome.reason) == ("eager", "plan_layout")  # type: ignore[union-attr]
    with pytest.raises(PlanLayoutError):
        runner.forward(batch, StepPlan("graph", (4,)))


def test_a_plan_with_another_layout_is_refused_where_on_miss_is_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tiny_runner(on_miss="error") as runner:
        monkeypatch.setattr(runner.attn_backend, "init_forward_metadata_replay_cuda_graph", refuse_plan)
        with pytest.raises(PlanLayoutError):
            runner.forward(Requests(runner).first(3))


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


# --- contract 10: nothing is silent ----------------------------------------------------------------


def test_steps_add_up_and_the_first_of_each_kind_is_warned_about() -> None:
    with tiny_runner(capture_sizes=(2, 4), padding="exact") as runner:
        graphs, requests = graphs_of(runner), Requests(runner)
        with pytest.warns(RuntimeWarning) as caught:
            for n in (2, 3, 4, 5, 8, 3, 0):
                runner.forward(requests.first(n))

        assert graphs.outcome_counts == {
            ("graph", ""): 2,
            ("eager", "not_captured"): 2,
            ("eager", "above_max"): 2,
            ("graph", "idle"): 1,
        }
        assert [str(w.message).split(":")[0] for w in caught] == [
            "a decode batch of 3 runs eager",
            "a decode batch of 5 runs eager",
        ]
        assert len(graphs.warnings) == 2


def test_a_batch_that_may_not_run_is_refused_and_can_run_says_so() -> None:
    with tiny_runner(capture_sizes=(2, 4), above_max="error") as runner:
        batch = Requests(runner).first(5)

        assert not graphs_of(runner).can_run(batch)
        with pytest.raises(NoUsableGraphError, match="batch of 5 is refused"):
            runner.forward(batch)


def test_can_run_is_true_only_if_replay_would_use_graphs() -> None:
    with tiny_runner(capture_sizes=(2, 4), padding="exact", above_max="split") as runner:
        graphs, requests = graphs_of(runner), Requests(runner)

        assert [graphs.can_run(requests.first(n)) for n in (0, 1, 2, 3, 4, 5, 8)] == [
            True,  # idle: the smallest graph
            False,
            True,
            False,
            True,
            True,  # split
            True,
        ]
        prefill = requests.first(2)
        prefill.forward_mode = ForwardMode.EXTEND
        assert not graphs.can_run(prefill)
        with pytest.raises(RunnerError, match="extend batch has no graph"):
            graphs.replay(prefill)


# --- idle, split, costs ----------------------------------------------------------------------------


def test_an_idle_batch_replays_the_smallest_graph_and_returns_no_row(runner: ModelRunner) -> None:
    output = runner.forward(ForwardBatch.idle())

    assert output.next_token_logits.shape == (0, runner.vocab_size)
    outcome = runner.outcome
    assert outcome is not None
    assert (outcome.mode, outcome.reason, outcome.sizes) == ("graph", "idle", (1,))


@pytest.mark.parametrize("sizes", [(4, 4), (4, 2, 1), (2, 4, 1), (1, 8)])
def test_the_parts_of_a_split_equal_the_same_requests_decoded_alone(
    runner: ModelRunner, sizes: tuple[int, ...]
) -> None:
    requests = Requests(runner)
    split = logits(runner, requests.first(7), StepPlan("split", sizes))

    outcome = runner.outcome
    assert outcome is not None
    assert (outcome.mode, outcome.num_graphs, outcome.padded_batch_size) == ("split", len(sizes), sum(sizes))
    first = 0
    for size in sizes:
        end = min(first + size, 7)
        part = requests.batch(*range(first, end))
        assert torch.equal(split[first:end], logits(runner, part, StepPlan("graph", (size,))))
        first = end


def test_a_batch_above_the_largest_graph_is_split_where_that_is_the_policy() -> None:
    with tiny_runner(capture_sizes=(1, 2), above_max="split") as runner:
        batch = Requests(runner).first(8)
        with pytest.warns(RuntimeWarning, match="runs split"):
            replayed = logits(runner, batch)

        assert runner.outcome.sizes == (2, 2, 2, 2)  # type: ignore[union-attr]
        assert_same_tokens(replayed, logits(runner, batch, EAGER))


def test_split_logits_live_apart_from_the_graphs_output(runner: ModelRunner) -> None:
    requests = Requests(runner)
    returned = runner.forward(requests.first(3), StepPlan("split", (2, 1))).next_token_logits
    kept = returned.clone()
    runner.forward(requests.batch(4, 5, 6), StepPlan("graph", (4,)))

    assert torch.equal(returned, kept)


def test_measured_costs_steer_cheapest_and_split() -> None:
    with tiny_runner(padding="split") as runner:
        graphs, requests = graphs_of(runner), Requests(runner)
        runner.forward(requests.first(5))
        assert runner.outcome.reason == "no_costs"  # type: ignore[union-attr]

        graphs.set_step_costs(StepCosts(graph_ms={1: 1.0, 2: 1.1, 4: 1.2, 8: 9.0}))
        runner.forward(requests.first(5))
        assert runner.outcome.sizes == (4, 1)  # type: ignore[union-attr]
        assert graphs.plan(3) == StepPlan("graph", (4,))


def test_host_prepare_is_measured_for_every_mode(runner: ModelRunner) -> None:
    requests = Requests(runner)
    for plan in (None, EAGER, StepPlan("eager", (4,)), StepPlan("split", (2, 1))):
        runner.forward(requests.first(3), plan)
        assert runner.outcome.host_prepare_us > 0  # type: ignore[union-attr]


def test_forced_plans_are_checked_before_anything_runs(runner: ModelRunner) -> None:
    batch = Requests(runner).first(3)
    with pytest.raises(RunnerError, match=r"sizes \[3\] are not captured"):
        runner.forward(batch, StepPlan("graph", (3,)))
    with pytest.raises(RunnerError, match="cannot be padded to 9 rows"):
        runner.forward(batch, StepPlan("eager", (9,)))
