"""FlashInfer's workspaces: how large they must be, and how plans share them safely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runners.attention.base import AttentionGroup
from runners.errors import RunnerError
from runners.staging import CopyFences

#: Thread blocks of 128 threads, the smallest that the decode kernel uses, resident on one SM.
_MAX_DECODE_BLOCKS_PER_SM = 16
#: Blocks an SM that the tensor-core scheduler counts on (`PrefillPlanImpl` in scheduler.cuh).
_PREFILL_BLOCKS_PER_SM = 2
#: Rows of the largest and the smallest query tile of the tensor-core kernels.
_LARGEST_TILE, _SMALLEST_TILE = 128, 16
#: Three indices and a flag for each work item.
_ITEM_BYTES = 13
#: Arrays of one int32 a work item in the Hopper prefill scheduler (`PrefillSM90Plan`).
_SM90_ARRAYS = 7
#: Plans that may be queued before `PlanStaging.acquire` has to wait for one of them, per group.
_QUEUED_PLANS = 4
#: Tokens of one prefill step beyond which no workspace is set aside.
_MAX_PREFILL_TOKENS = 131072


def float_workspace_bytes(group: AttentionGroup, max_batch_size: int, num_sms: int) -> int:
    """Return an upper bound, in bytes, for the partial results of one split attention step.

    Follows scheduler.cuh of FlashInfer 0.6.13 to 0.7.4: `DecodePlanImpl` splits into at most one work
    item a resident block and head; `PrefillPlanImpl` into two a SM, of up to 128 rows, and in CUDA
    graphs into at least one a request. (0.7.4 divides by the group size; older versions do not.)
    """
    heads, kv_heads = group.num_qo_heads, group.num_kv_heads
    prefill_items = max(_PREFILL_BLOCKS_PER_SM * num_sms // kv_heads, 1)
    decode_rows = _MAX_DECODE_BLOCKS_PER_SM * num_sms // kv_heads
    prefill_rows = prefill_items * _LARGEST_TILE
    graph_items = max(prefill_items, _num_tiles(heads // kv_heads, max_batch_size))
    graph_rows = graph_items * _decode_tile(heads // kv_heads)
    return _rounded(4 * heads * max(decode_rows, prefill_rows, graph_rows) * (group.head_dim + 1))


def int_workspace_bytes(
    group: AttentionGroup, max_batch_size: int, max_prefill_tokens: int, num_sms: int
) -> int:
    """Return an upper bound, in bytes, for the schedule of one plan (indices, offsets, masks)."""
    heads, kv_heads = group.num_qo_heads, group.num_kv_heads
    group_size = heads // kv_heads
    items = max(
        _MAX_DECODE_BLOCKS_PER_SM * num_sms // kv_heads,
        _num_tiles(group_size, max_batch_size),
        max_prefill_tokens * group_size // _SMALLEST_TILE + max_batch_size,
    )
    offsets = 4 * (max_prefill_tokens + max_batch_size + 2)
    sm90_items = heads * (max_prefill_tokens // _LARGEST_TILE + max_batch_size)
    sm90 = 4 * (_SM90_ARRAYS * sm90_items + num_sms + 1)
    return _rounded(max(_ITEM_BYTES * items + offsets, sm90))


def _decode_tile(group_size: int) -> int:
    """Rows of a decode step's query tile (`FA2DetermineCtaTileQ` for one token a request)."""
    if group_size <= _SMALLEST_TILE:
        return _SMALLEST_TILE
    return 64 if group_size <= 64 else _LARGEST_TILE


def _num_tiles(group_size: int, batch_size: int) -> int:
    """Query tiles of a captured decode step, by the looser rule of versions before 0.7."""
    return -(-batch_size * group_size // _decode_tile(group_size)) + batch_size


def _rounded(num_bytes: int) -> int:
    """Room for the 16-byte alignment of each array, in whole 64 KiB."""
    return -(-(num_bytes + 1024) // 65536) * 65536


class PlanStaging:
    """Pinned buffers that plans are written to, in turn.

    FlashInfer writes a schedule to one pinned buffer and queues its copy. The next plan would overwrite
    it while that copy still waits for the running step, and both steps would see the second schedule.

    Args:
        num_bytes: of each buffer; 0 where the wrapper keeps a buffer of its own (then one turn).
        depth: plans that may be queued.
        device: where the copies run.
    """

    def __init__(self, num_bytes: int, depth: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_cuda) for _ in range(depth)]
        self._fences = CopyFences(depth, device)

    @property
    def pinned_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def acquire(self) -> torch.Tensor:
        """Return the buffer for the next plan, once no queued copy reads it."""
        return self._buffers[self._fences.next_turn()]

    def settle(self) -> None:
        """Note, after a launch, which buffer its plan's copy reads. A later `acquire` does it otherwise."""
        self._fences.settle()


@dataclass(frozen=True)
class Workspace:
    """What the wrappers of one attention group write to. Shared by all of its capture sizes.

    Sharing is safe because a step's plan copy, its kernels and the next step's plan copy run in order
    on one stream. Groups share the float buffer (layers run one after the other) but not the integer
    one: all groups of a step are planned before its first kernel runs.
    """

    float_buffer: torch.Tensor
    int_buffer: torch.Tensor
    staging: PlanStaging


def prefill_token_limit(max_batch_size: int, max_seq_len: int) -> int:
    """Return how many new tokens one prefill step may have at most."""
    return min(max_batch_size * max_seq_len, _MAX_PREFILL_TOKENS)


def needed_workspace_bytes(
    groups: Sequence[AttentionGroup], *, max_batch_size: int, max_prefill_tokens: int, num_sms: int
) -> int:
    """Return what `allocate_workspaces` will take on the device for these limits."""
    shared = max(float_workspace_bytes(group, max_batch_size, num_sms) for group in groups)
    own = (int_workspace_bytes(group, max_batch_size, max_prefill_tokens, num_sms) for group in groups)
    return shared + sum(own)


def allocate_workspaces(
    groups: Sequence[AttentionGroup],
    *,
    max_batch_size: int,
    max_prefill_tokens: int,
    num_sms: int,
    device: torch.device,
    workspace_bytes: int | None = None,
) -> list[Workspace]:
    """Return a workspace per group, large enough for every plan of these limits.

    `workspace_bytes` overrides the size of the float buffer. Raises RunnerError, with the size needed,
    if it is too small or if the device has not that much memory free.
    """
    needed = max(float_workspace_bytes(group, max_batch_size, num_sms) for group in groups)
    sizes = [int_workspace_bytes(group, max_batch_size, max_prefill_tokens, num_sms) for group in groups]
    check_workspace(needed, sum(sizes), max_batch_size, workspace_bytes, _free_bytes(device))
    # FlashInfer wants zeros: some kernels keep counters in it between launches.
    float_buffer = torch.zeros(workspace_bytes or needed, dtype=torch.uint8, device=device)
    return [
        Workspace(
            float_buffer,
            torch.zeros(size, dtype=torch.uint8, device=device),
            PlanStaging(size, _QUEUED_PLANS, device),
        )
        for size in sizes
    ]


def check_workspace(
    needed: int, int_bytes: int, max_batch_size: int, workspace_bytes: int | None, free_bytes: int | None
) -> None:
    """Raise RunnerError if FlashInfer's workspace would overflow, or would not fit the device."""
    if workspace_bytes is not None and workspace_bytes < needed:
        raise RunnerError(
            f"a FlashInfer workspace of {workspace_bytes:,} bytes is too small: batches up to {max_batch_size} "
            f"need {needed:,} bytes. Raise workspace_bytes, or leave it unset."
        )
    total = max(needed, workspace_bytes or 0) + int_bytes
    if free_bytes is not None and total > free_bytes:
        raise RunnerError(
            f"FlashInfer's workspaces need {total:,} bytes, but {free_bytes:,} are free on the device: lower "
            "attention.num_pages or runner.max_batch_size."
        )


def _free_bytes(device: torch.device) -> int | None:
    """What the device has free, the memory that torch keeps cached included."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free) + cached
