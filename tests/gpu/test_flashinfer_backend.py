"""FlashInfer's attention against the torch reference: eager, captured, replanned, poisoned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from runners.attention import flashinfer_adapter
from runners.attention.base import AttentionGroup
from runners.attention.flashinfer_adapter import MissingKernelError
from runners.attention.flashinfer_backend import FlashInferAttentionBackend
from runners.attention.kv_write import write_kv, write_kv_torch
from runners.attention.page_indices import PageIndices, write_page_indices, write_page_indices_torch
from runners.forward_batch import ForwardMode
from runners.paged_kv import PagedKV
from tests.gpu.attention_rig import AttentionRig

#: bfloat16 outputs are rounded to 2^-9 of their size; the kernels were seen within 0.003 of float32.
TOLERANCE = 0.008
#: A length on, one before and one after each kind of page edge.
RAGGED = (1, 15, 16, 17, 31, 32, 33, 511)


def group(num_qo_heads: int = 16, num_kv_heads: int = 8, head_dim: int = 128, **options) -> AttentionGroup:
    return AttentionGroup(num_qo_heads, num_kv_heads, head_dim, sm_scale=head_dim**-0.5, **options)


SHAPES = [
    pytest.param(group(16, 8), "never", id="16/8-decode-kernel"),
    pytest.param(group(16, 8), "always", id="16/8-tensor-cores"),
    pytest.param(group(32, 8), "auto", id="32/8-auto"),
    pytest.param(group(9, 3, 64), "auto", id="9/3-head-64"),
]


@contextmanager
def no_syncs() -> Iterator[None]:
    """Whatever waits for the device in the block raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- the kernels of our own --------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 16, 32])
@pytest.mark.parametrize("batch_size", [1, 3, 16])
@pytest.mark.parametrize("has_slots", [False, True])
def test_the_page_index_kernel_equals_its_twin(
    device: torch.device, page_size: int, batch_size: int, has_slots: bool
) -> None:
    table = torch.randperm(20 * 600, device=device).int().view(20, 600)
    rows = torch.randperm(20, device=device)[:batch_size].int()
    lens = torch.randint(1, 600 * page_size + 1, (batch_size,), device=device).int()
    kernel, twin = (PageIndices.allocate(16, 600, device) for _ in range(2))
    slots = torch.randint(0, 600 * page_size, (batch_size,), device=device) if has_slots else None
    write_page_indices(kernel, table, rows, lens, page_size, slots)
    write_page_indices_torch(twin, table, rows, lens, page_size, slots)
    assert torch.equal(kernel.indptr, twin.indptr)
    assert torch.equal(kernel.indices, twin.indices)
    assert torch.equal(kernel.last_page_len, twin.last_page_len)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("heads_first", [False, True])
def test_the_cache_write_kernel_equals_its_twin(
    device: torch.device, dtype: torch.dtype, heads_first: bool
) -> None:
    caches = [torch.zeros(5, 4, 3, 64, device=device).to(dtype) for _ in range(4)]
    k, v = (torch.randn(6, 3, 64, dtype=torch.bfloat16, device=device) for _ in range(2))
    if heads_first:
        k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v))
    slots = torch.tensor([3, 19, -1, 0, 7, 11], device=device)
    write_kv(caches[0], caches[1], k, v, slots)
    write_kv_torch(caches[2], caches[3], k, v, slots)
    assert torch.equal(caches[0].float(), caches[2].float())
    assert torch.equal(caches[1].float(), caches[3].float())


# --- eager -------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 16, 32])
@pytest.mark.parametrize(("shape", "tensor_cores"), SHAPES)
def test_eager_decode_of_unlike_lengths(
    device: torch.device, shape: AttentionGroup, tensor_cores: str, page_size: int
) -> None:
    rig = AttentionRig(device, [shape], page_size=page_size, use_tensor_cores=tensor_cores)
    rows = rig.start(*RAGGED)
    for _ in range(3):
        assert rig.run_eager(rig.batch(rows)) < TOLERANCE
    assert rig.run_eager(rig.batch(rows[5:])) < TOLERANCE


@pytest.mark.parametrize("prefill", ["fa2", "fa3", "auto"])
@pytest.mark.parametrize("page_size", [1, 16, 32])
def test_prefill_whole_and_in_chunks_and_then_decode(
    device: torch.device, prefill: str, page_size: int
) -> None:
    rig = AttentionRig(device, [group()], page_size=page_size, prefill=prefill)
    rows = rig.start(0, 0, 0)
    assert rig.run_eager(rig.batch(rows, new=[1, 100, 257])) < TOLERANCE, "whole prompts"
    assert rig.run_eager(rig.batch(rows, new=[300, 1, 64])) < TOLERANCE, "chunks over a cached prefix"
    assert rig.run_eager(rig.batch(rows)) < TOLERANCE, "decode over what prefill wrote"


def test_prefill_with_head_size_64_falls_back_where_fa3_is_not_built(device: torch.device) -> None:
    rig = AttentionRig(device, [group(9, 3, 64)])
    rows = rig.start(0, 0)
    assert rig.run_eager(rig.batch(rows, new=[33, 70])) < TOLERANCE
    assert rig.run_eager(rig.batch(rows, new=[16, 3])) < TOLERANCE


# --- captured ----------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 16, 32])
@pytest.mark.parametrize(("shape", "tensor_cores"), SHAPES)
def test_a_captured_graph_serves_other_lengths_than_it_was_captured_with(
    device: torch.device, shape: AttentionGroup, tensor_cores: str, page_size: int
) -> None:
    rig = AttentionRig(device, [shape], page_size=page_size, use_tensor_cores=tensor_cores)
    rig.capture(1, 4, 8, 16)
    rows = rig.start(*RAGGED)
    for _ in range(20):
        assert rig.check_replay(rig.batch(rows), size=8) < TOLERANCE


def test_padding_rows_and_changing_sizes_do_not_change_the_real_rows(device: torch.device) -> None:
    rig = AttentionRig(device, [group()])
    rig.capture(1, 4, 8, 16)
    rows = rig.start(*RAGGED)
    for n, size in [(8, 16), (3, 4), (8, 8), (1, 16), (1, 1), (5, 8), (4, 4), (8, 16)]:
        assert rig.check_replay(rig.batch(rows[:n]), size) < TOLERANCE


def test_a_replay_after_prefill_and_eager_decode_finds_its_own_plan(device: torch.device) -> None:
    rig = AttentionRig(device, [group()])
    rig.capture(4)
    rows, fresh = rig.start(40, 50, 60, 70), rig.start(0)
    for step in range(6):
        assert rig.check_replay(rig.batch(rows), size=4) < TOLERANCE
        other = rig.batch(fresh, new=[37]) if step % 2 == 0 else rig.batch(rows[:2])
        assert rig.run_eager(other) < TOLERANCE


@pytest.mark.parametrize("tensor_cores", ["never", "always"])
def test_a_plan_is_kept_while_no_request_needs_another_chunk(device: torch.device, tensor_cores: str) -> None:
    """A chunk is 128 tokens at least, so the plan of the capture serves the first replays too."""
    rig = AttentionRig(device, [group()], page_size=16, use_tensor_cores=tensor_cores)
    rig.capture(2)
    rows = rig.start(15, 100)
    for _ in range(28):
        assert rig.check_replay(rig.batch(rows), size=2) < TOLERANCE
    assert (rig.backend.decode.num_plans, rig.backend.decode.num_plans_reused) == (0, 28)
    assert rig.check_replay(rig.batch(rows), size=2) < TOLERANCE
    assert rig.backend.decode.num_plans == 1


@pytest.mark.parametrize("tensor_cores", ["never", "always"])
def test_a_kept_plan_is_the_plan_that_would_be_made(device: torch.device, tensor_cores: str) -> None:
    """The outputs under a kept plan are those under a fresh one, bit for bit, over many page edges."""
    rig = AttentionRig(device, [group()], page_size=16, max_batch_size=64, use_tensor_cores=tensor_cores)
    rig.capture(64)
    rows = rig.start(*np.random.default_rng(0).integers(1, 900, 64).tolist())
    for _ in range(40):
        batch = rig.batch(rows)
        kept = [out.clone() for out in rig.replay(batch, size=64)]
        rig.backend.decode.forget_plan()
        fresh = rig.replay(batch, size=64)
        assert all(torch.equal(a, b) for a, b in zip(kept, fresh, strict=True))
    assert rig.backend.decode.num_plans_reused > 10


def test_a_batch_too_large_to_split_is_planned_once(device: torch.device) -> None:
    """One chunk a request whatever the lengths: the grid is full."""
    rig = AttentionRig(device, [group()], page_size=16, max_batch_size=256, max_seq_len=256)
    rig.capture(256)
    rows = rig.start(*np.random.default_rng(0).integers(1, 200, 256).tolist())
    for _ in range(20):
        assert rig.check_replay(rig.batch(rows), size=256) < TOLERANCE
    assert rig.backend.decode.num_plans == 0


def test_plans_queued_behind_a_busy_device_do_not_spoil_each_other(device: torch.device) -> None:
    """The host plans steps ahead while the device has not begun the first of them."""
    rig = AttentionRig(device, [group()], page_size=1)
    rig.capture(2, 8)
    rows = rig.start(*RAGGED)
    assert rig.check_replay(rig.batch(rows), size=8) < TOLERANCE
    torch.cuda._sleep(200_000_000)
    queued = []
    for step in range(12):
        n, size = (8, 8) if step % 3 else (2, 2)
        batch = rig.batch(rows[:n])
        queued.append((batch, n, [out.clone() for out in rig.replay(batch, size)]))
    for batch, n, got in queued:
        assert rig.error(got, rig.expected(batch.to(device), rig.inputs(n))) < TOLERANCE


def test_nothing_waits_for_the_device_from_prepare_to_launch(device: torch.device) -> None:
    rig = AttentionRig(device, [group(32, 8)], page_size=16)
    rig.capture(4, 8)
    rows = rig.start(*RAGGED)
    batches = [(rig.batch(rows[:n]), size) for n, size in [(8, 8), (3, 4)] * 25]
    with no_syncs():
        for batch, size in batches:
            rig.replay(batch, size)
    assert rig.backend.decode.num_plans == 50


def test_nothing_waits_for_the_device_in_a_prefill_plan(device: torch.device) -> None:
    rig = AttentionRig(device, [group()])
    rows = rig.start(0, 0)
    for new in ([20, 30], [20, 30]):
        batch = rig.batch(rows, new=new).to(device)
        with no_syncs():
            rig.backend.init_forward_metadata(batch)
        assert rig.backend._extend is not None and rig.backend._extend.rows is batch.req_pool_indices


# --- what it claims ----------------------------------------------------------------------------


@pytest.mark.parametrize("tensor_cores", ["never", "always"])
def test_nan_past_a_request_never_reaches_the_output(device: torch.device, tensor_cores: str) -> None:
    rig = AttentionRig(device, [group()], use_tensor_cores=tensor_cores)
    assert rig.backend.masks_tail
    rig.capture(8)
    rows = rig.start(*RAGGED)
    batch = rig.batch(rows)
    clean = [out.clone() for out in rig.replay(batch, size=8)]
    rig.kv.poison_unallocated()
    rig.kv.poison_tails()
    poisoned = rig.replay(batch, size=8)
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))
    rig.kv.check_null_page()


@pytest.mark.parametrize("prefill", ["fa2", "fa3"])
def test_nan_past_a_chunk_never_reaches_a_prefill(device: torch.device, prefill: str) -> None:
    rig = AttentionRig(device, [group()], prefill=prefill)
    rows = rig.start(5, 20)
    batch = rig.batch(rows, new=[7, 70])
    rig.kv.poison_tails()
    assert rig.run_eager(batch) < TOLERANCE


def test_many_sizes_share_their_workspaces(device: torch.device) -> None:
    """Each wrapper alone would bring 8 MiB of device memory: 288 MiB for 36 sizes."""
    rig = AttentionRig(device, [group()], max_batch_size=256)
    before = torch.cuda.memory_allocated(device)
    for size in range(1, 37):
        static = rig.buffers.static_batch(size)
        rig.backend.init_forward_metadata_capture_cuda_graph(
            size, size, static.req_pool_indices, static.seq_lens, ForwardMode.DECODE
        )
    assert torch.cuda.memory_allocated(device) - before < 2**20
    memory = rig.backend.memory()
    assert memory["int_workspace"] < 4 * 2**20
    assert 0 < memory["pinned"] < 16 * 2**20


def test_public_calls_alone_give_the_same_result(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_adapter, "may_use_private_parts", lambda version: False)
    rig = AttentionRig(device, [group()])
    rig.capture(4, 8)
    rows = rig.start(*RAGGED)
    for n, size in [(8, 8), (3, 4)] * 4:
        assert rig.check_replay(rig.batch(rows[:n]), size) < TOLERANCE
    assert rig.run_eager(rig.batch(rows)) < TOLERANCE


def test_a_kernel_that_is_not_built_is_named_with_the_remedy(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flashinfer")
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    odd = [group(head_dim=256, sliding_window=7, logits_soft_cap=3.0)]
    kv = PagedKV(
        odd, num_pages=4, page_size=16, max_requests=1, max_seq_len=32, dtype=torch.float16, device=device
    )
    with pytest.raises(MissingKernelError, match=r"window 7.*docs/offline\.md"):
        FlashInferAttentionBackend(odd, kv, max_batch_size=1, max_seq_len=32, device=device)


# --- kernels that are not in every prepared set ------------------------------------------------


def test_each_group_has_its_own_window_and_cap(device: torch.device) -> None:
    groups = [group(), group(sliding_window=20), group(sliding_window=100, logits_soft_cap=30.0)]
    rig = AttentionRig(device, groups)
    rows = rig.start(0, 0, 0)
    assert rig.run_eager(rig.batch(rows, new=[10, 100, 257])) < TOLERANCE, rig.errors
    assert rig.run_eager(rig.batch(rows, new=[50, 1, 64])) < TOLERANCE, rig.errors
    rig.capture(4)
    for _ in range(20):
        assert rig.check_replay(rig.batch(rows), size=4) < TOLERANCE, rig.errors


def test_float16(device: torch.device) -> None:
    rig = AttentionRig(device, [group()], dtype=torch.float16)
    rows = rig.start(0, 0)
    assert rig.run_eager(rig.batch(rows, new=[33, 70])) < TOLERANCE
    rig.capture(2)
    assert rig.check_replay(rig.batch(rows), size=2) < TOLERANCE


def test_an_fp8_cache(device: torch.device) -> None:
    rig = AttentionRig(device, [group()], kv_dtype=torch.float8_e4m3fn)
    rows = rig.start(0, 0)
    assert rig.run_eager(rig.batch(rows, new=[33, 70])) < TOLERANCE
    rig.capture(2)
    for _ in range(3):
        assert rig.check_replay(rig.batch(rows), size=2) < TOLERANCE
