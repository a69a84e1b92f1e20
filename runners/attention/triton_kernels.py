# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-warn-unused-ignores
"""Triton kernels of the FlashInfer backend. Imported only where a CUDA device is used."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

from runners.attention.page_indices import PageIndices

#: Page numbers that one iteration moves.
_BLOCK_PAGES = 256


# NOTE: batch_size must not be specialised. Triton would compile a variant for 1 and for multiples of
# 16, within the capture of the first size that needs it.
@triton.jit(do_not_specialize=["batch_size"])
def _page_indices_kernel(
    page_table,
    rows,
    seq_lens,
    slots,
    indptr,
    indices,
    last_page_len,
    batch_size,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
):
    request = tl.program_id(0)
    row = tl.arange(0, BLOCK_ROWS)
    lens = tl.load(seq_lens + row, mask=row < batch_size, other=0)
    counts = (lens + PAGE_SIZE - 1) // PAGE_SIZE
    # Each program adds up the counts before it: cheaper than a second kernel that waits for a scan.
    start = tl.sum(tl.where(row < request, counts, 0), axis=0)
    length = tl.load(seq_lens + request)
    count = (length + PAGE_SIZE - 1) // PAGE_SIZE
    if request == 0:
        tl.store(indptr, 0)
    tl.store(indptr + request + 1, start + count)
    tl.store(last_page_len + request, length - (count - 1) * PAGE_SIZE)
    source = page_table + tl.load(rows + request).to(tl.int64) * table_stride
    for first in range(0, count, BLOCK_PAGES):
        column = first + tl.arange(0, BLOCK_PAGES)
        page = tl.load(source + column, mask=column < count, other=0)
        if HAS_SLOTS:
            newest = (tl.load(slots + request) // PAGE_SIZE).to(tl.int32)
            page = tl.where((column == count - 1) & (newest > 0), newest, page)
        tl.store(indices + start + column, page, mask=column < count)


@triton.jit
def _write_kv_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    dim = tl.arange(0, BLOCK_DIM)[None, :]
    inside = (head < NUM_HEADS) & (dim < HEAD_DIM) & (slot >= 0)
    target = slot * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + dim
    key = tl.load(k + token * k_stride_token + head * k_stride_head + dim, mask=inside, other=0.0)
    tl.store(k_cache + target, key.to(k_cache.dtype.element_ty), mask=inside)
    value = tl.load(v + token * v_stride_token + head * v_stride_head + dim, mask=inside, other=0.0)
    tl.store(v_cache + target, value.to(v_cache.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _feed_tokens_kernel(input_ids, token_source, sampled, num_rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(token_source + row, mask=row < num_rows, other=-1)
    fed = source >= 0
    tl.store(input_ids + row, tl.load(sampled + source, mask=fed, other=0), mask=fed)


def launch_feed_tokens(input_ids: torch.Tensor, token_source: torch.Tensor, sampled: torch.Tensor) -> None:
    """Queue the kernel of `feed_tokens`."""
    num_rows = input_ids.shape[0]
    _feed_tokens_kernel[(triton.cdiv(num_rows, 256),)](input_ids, token_source, sampled, num_rows, BLOCK=256)


def launch_page_indices(
    out: PageIndices,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    slots: torch.Tensor | None,
) -> None:
    """Queue the kernel of `write_page_indices`."""
    batch_size = seq_lens.shape[0]
    _page_indices_kernel[(batch_size,)](
        page_table,
        rows,
        seq_lens,
        rows if slots is None else slots,
        out.indptr,
        out.indices,
        out.last_page_len,
        batch_size,
        page_table.stride(0),
        PAGE_SIZE=page_size,
        HAS_SLOTS=slots is not None,
        # One width for all batches: a width per capture size would be a compile per capture size.
        BLOCK_ROWS=triton.next_power_of_2(out.max_batch_size),
        BLOCK_PAGES=_BLOCK_PAGES,
    )


def launch_write_kv(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> None:
    """Queue the kernel of `write_kv`."""
    num_tokens, num_heads, head_dim = k.shape
    k = k if k.stride(2) == 1 else k.contiguous()
    v = v if v.stride(2) == 1 else v.contiguous()
    _write_kv_kernel[(num_tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slots,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=triton.next_power_of_2(num_heads),
        BLOCK_DIM=triton.next_power_of_2(head_dim),
    )
