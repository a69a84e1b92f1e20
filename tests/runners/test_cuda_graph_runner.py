"""What the graph runner captures, and that its replays equal eager steps: on a real tiny decoder, emulated."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

from runners.attention.torch_backend import TorchAttentionBackend
from runners.batches import decode_batch
from runners.cuda_graph_runner import (
    is_capture_mode,
)
from runners.errors import (
    NullPageError,
    PlanLayoutError,
)
from runners.forward_batch import ForwardBatch, ForwardMode
from runners.model_runner import ModelRunner
from runners.padding import StepPlan
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


def test_padding_rows_have_the_length_that_the_backend_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchAttentionBackend, "get_cuda_graph_seq_len_fill_value", lambda self: 3)
    with tiny_runner() as runner:
        graphs, batch = graphs_of(runner), Requests(runner).first(5)
        replayed = logits(runner, batch)

        assert graphs.seq_len_fill_value == 3
        assert graphs.buffers.seq_lens[5:].tolist() == [3] * 3
        assert graphs.output_buffers[8].next_token_logits.isfinite().all()
        assert_same_tokens(replayed, logits(runner, batch, EAGER))


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


def test_a_split_that_ends_halfway_takes_none_of_the_ids_that_its_requests_are_fed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tiny_runner(capture_sizes=(1, 2), above_max="split") as runner:
        backend, requests = runner.attn_backend, Requests(runner, [5, 4, 9])
        plan_replay = backend.init_forward_metadata_replay_cuda_graph

        def refuse_the_second(bs: int, *arguments: Any) -> None:
            plan_replay(bs, *arguments) if bs == 2 else refuse_plan()

        def step(token_ids: list[int], source: list[int] | None = None) -> ForwardBatch:
            sources = None if source is None else np.array(source, dtype=np.int32)
            return decode_batch(runner.kv, requests.rows, requests.lengths, np.array(token_ids), sources)

        expected = logits(runner, step([12, 5, 30]), EAGER)
        runner.token_ids[:3] = torch.tensor([30, 12, 7])
        monkeypatch.setattr(backend, "init_forward_metadata_replay_cuda_graph", refuse_the_second)
        with pytest.warns(RuntimeWarning, match="differs in layout"):
            assert torch.equal(logits(runner, step([0, 5, 0], [1, -1, 0])), expected)
