"""Decode attention over the paged cache: one query token a request, keys and values split over programs.

The grid is fixed by the batch size, the lengths and pages are read on the device: a captured graph
needs no plan. With `FUSED` the kernel starts from the raw projections: it norms and rotates the
query, rotates the new key, writes the new key and value to the cache, and takes them into the
softmax from registers, so that no program reads what another one of this kernel writes.

The last program of a head to finish adds up the partial results in a fixed order (an integer counter
says who is last), so the bits do not depend on timing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runners.models.fused.kernels.dependent_launch import prefetch_tokens, start_next, wait_for_previous
from runners.models.fused.kernels.epilogue import arrives_last
from runners.models.fused.kernels.qk_rope_cache import rotate_heads

#: Stands for minus infinity, finite so that a difference of two is not NaN.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def softmax_scores(scores, sm_scale, SOFT_CAP: tl.constexpr):
    """Scores in units of log2(e), capped where the model asks for it."""
    scores *= sm_scale
    if SOFT_CAP > 0:
        scores = SOFT_CAP * (2.0 * tl.sigmoid(2.0 * scores / SOFT_CAP) - 1.0)
    return scores * 1.4426950408889634


@triton.jit
def combine_splits(
    part_ptr, stat_ptr, out_ptr, head,
    SPLITS: tl.constexpr, GROUP: tl.constexpr, GROUP_POWER: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one KV head. `.cg`: the L1 cache may hold an older layer's."""
    d, g = tl.arange(0, HEAD_DIM), tl.arange(0, GROUP_POWER)
    rows = head * SPLITS + tl.arange(0, SPLITS)
    mask = (g < GROUP)[None, :] & (rows >= 0)[:, None]
    stat_at = rows[:, None] * 2 * GROUP + g[None, :]
    top = tl.load(stat_ptr + stat_at, mask=mask, other=0.0, cache_modifier=".cg")
    total = tl.load(stat_ptr + stat_at + GROUP, mask=mask, other=1.0, cache_modifier=".cg")
    part_at = (rows[:, None] * GROUP + g[None, :])[:, :, None] * HEAD_DIM + d[None, None, :]
    part = tl.load(part_ptr + part_at, mask=mask[:, :, None], other=0.0, cache_modifier=".cg")
    weight = tl.exp2(top - tl.max(top, axis=0)[None, :])
    weight /= tl.sum(weight * total, axis=0)[None, :]
    out = tl.sum(part * weight[:, :, None], axis=0)
    out_at = g[:, None] * HEAD_DIM + d[None, :]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=(g < GROUP)[:, None])


@triton.jit
def cache_rows(
    pages, kv_head, start, end, BLOCK: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """`[BLOCK]` int64: where the tokens from `start` on lie in a cache, and which of them are before `end`."""
    token = start + tl.arange(0, BLOCK)
    mask = token < end
    page = tl.load(pages + token // PAGE_SIZE, mask=mask, other=0).to(tl.int64)
    return ((page * PAGE_SIZE + token % PAGE_SIZE) * NUM_KV_HEADS + kv_head) * HEAD_DIM, mask


@triton.jit
def load_cache(ptr, at, mask, d):
    """`[BLOCK, HEAD_DIM]`. Masked values are zero, never what the cache holds there: 0 * NaN would be NaN."""
    return tl.load(ptr + at[:, None] + d[None, :], mask=mask[:, None], other=0.0)


@triton.jit
def attend(q, k, v, mask, top, total, acc, sm_scale, SOFT_CAP: tl.constexpr):
    """Take a block of tokens into the running softmax."""
    scores = softmax_scores(tl.dot(q, tl.trans(k), input_precision="ieee"), sm_scale, SOFT_CAP)
    scores = tl.where(mask[None, :], scores, LOWEST)
    higher = tl.maximum(top, tl.max(scores, axis=1))
    rescale = tl.exp2(top - higher)
    p = tl.exp2(scores - higher[:, None])
    total = total * rescale + tl.sum(p, axis=1)
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit
def decode_attention_kernel(
    q_ptr,  # FUSED: [bs, (GROUP + 2) * NUM_KV_HEADS, HEAD_DIM] raw; else [bs, heads, HEAD_DIM] rotated
    q_norm_ptr,  # [HEAD_DIM]
    k_norm_ptr,  # [HEAD_DIM]
    cos_sin_ptr,  # [max_positions, HEAD_DIM] float32
    k_cache_ptr,  # [num_pages, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM]
    v_cache_ptr,
    page_table_ptr,  # [rows, max_pages] int32
    request_ptr,  # [bs] int32: row of the page table
    seq_lens_ptr,  # [bs] int32, the new token included
    slots_ptr,  # [bs] int64: where the new key and value go
    out_ptr,  # [bs, GROUP * NUM_KV_HEADS, HEAD_DIM]
    part_ptr,  # [bs * NUM_KV_HEADS, SPLITS, GROUP, HEAD_DIM] float32
    stat_ptr,  # [bs * NUM_KV_HEADS, SPLITS, 2, GROUP] float32: largest score, sum
    counter_ptr,  # [bs * NUM_KV_HEADS] int32, zero before and after
    page_table_stride,
    sm_scale,
    eps,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_POWER: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    FUSED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PREFETCH: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head, split, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g, d = tl.arange(0, GROUP_BLOCK), tl.arange(0, HEAD_DIM)
    start_next(PDL)
    # Lengths, pages and slots are inputs of the step: no kernel after the embedding writes them.
    seq_len = tl.load(seq_lens_ptr + request)
    pages = page_table_ptr + tl.load(request_ptr + request).to(tl.int64) * page_table_stride
    past = seq_len - 1 if FUSED else seq_len
    oldest = tl.maximum(seq_len - WINDOW, 0) if WINDOW > 0 else 0
    chunk = tl.cdiv(tl.cdiv(past - oldest, SPLITS), BLOCK) * BLOCK
    begin = oldest + split * chunk
    end = tl.minimum(past, begin + chunk)
    # Nor does any write the cache of past tokens: the first block is on its way before the wait.
    at, mask = cache_rows(pages, kv_head, begin, end, BLOCK, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE)
    if PDL and PREFETCH >= 0:
        # The load of the values would otherwise wait for the keys on their way to shared memory.
        prefetch_tokens(v_cache_ptr, at, mask, HEAD_DIM)
    k_first = load_cache(k_cache_ptr, at, mask, d)
    v_first = load_cache(v_cache_ptr, at, mask, d)
    if PDL and PREFETCH > 0:
        next_at, next_mask = cache_rows(
            pages, kv_head, begin + BLOCK, end, PREFETCH, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE
        )
        prefetch_tokens(k_cache_ptr, next_at, next_mask, HEAD_DIM)
        prefetch_tokens(v_cache_ptr, next_at, next_mask, HEAD_DIM)
    wait_for_previous(PDL)

    q_at = (kv_head * GROUP + g) * HEAD_DIM
    top = tl.full([GROUP_BLOCK], LOWEST, tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    acc = tl.zeros([GROUP_BLOCK, HEAD_DIM], tl.float32)
    if FUSED:
        token_ptr = q_ptr + request.to(tl.int64) * (GROUP + 2) * NUM_KV_HEADS * HEAD_DIM
        cos_sin = cos_sin_ptr + (seq_len - 1).to(tl.int64) * HEAD_DIM
        q = rotate_heads(token_ptr, q_at, g < GROUP, q_norm_ptr, cos_sin, eps, HEAD_DIM, HAS_NORM)
        q = q.to(q_ptr.dtype.element_ty)
        if split == SPLITS - 1:
            one = tl.arange(0, 1)
            k_at = (GROUP * NUM_KV_HEADS + kv_head + one) * HEAD_DIM
            new_k = rotate_heads(token_ptr, k_at, one == 0, k_norm_ptr, cos_sin, eps, HEAD_DIM, HAS_NORM)
            new_k = new_k.to(k_cache_ptr.dtype.element_ty)
            new_v = tl.load(token_ptr + ((GROUP + 1) * NUM_KV_HEADS + kv_head) * HEAD_DIM + d)
            new_v = new_v.to(v_cache_ptr.dtype.element_ty)
            new_at = (tl.load(slots_ptr + request) * NUM_KV_HEADS + kv_head) * HEAD_DIM + d
            tl.store(k_cache_ptr + new_at[None, :], new_k)
            tl.store(v_cache_ptr + new_at, new_v)
            score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), axis=1)
            top = softmax_scores(score, sm_scale, SOFT_CAP)
            total = tl.full([GROUP_BLOCK], 1.0, tl.float32)
            acc += new_v.to(tl.float32)[None, :]
    else:
        token_ptr = q_ptr + request.to(tl.int64) * GROUP * NUM_KV_HEADS * HEAD_DIM
        q = tl.load(token_ptr + q_at[:, None] + d[None, :], mask=(g < GROUP)[:, None], other=0.0)

    # With a narrower cache the products are of the query's type.
    k, v = k_first.to(q.dtype), v_first.to(q.dtype)
    top, total, acc = attend(q, k, v, mask, top, total, acc, sm_scale, SOFT_CAP)
    for start in tl.range(begin + BLOCK, end, BLOCK, num_stages=STAGES):
        at, mask = cache_rows(pages, kv_head, start, end, BLOCK, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE)
        k = load_cache(k_cache_ptr, at, mask, d).to(q.dtype)
        v = load_cache(v_cache_ptr, at, mask, d).to(q.dtype)
        top, total, acc = attend(q, k, v, mask, top, total, acc, sm_scale, SOFT_CAP)

    head = request * NUM_KV_HEADS + kv_head
    head_out_ptr = out_ptr + head.to(tl.int64) * GROUP * HEAD_DIM
    mask_g = g < GROUP
    at = g[:, None] * HEAD_DIM + d[None, :]
    if SPLITS == 1:
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(head_out_ptr + at, out, mask=mask_g[:, None])
    else:
        row = head * SPLITS + split
        tl.store(part_ptr + row * GROUP * HEAD_DIM + at, acc, mask=mask_g[:, None])
        tl.store(stat_ptr + row * 2 * GROUP + g, top, mask=mask_g)
        tl.store(stat_ptr + (row * 2 + 1) * GROUP + g, total, mask=mask_g)
        if arrives_last(counter_ptr + head, SPLITS):
            combine_splits(part_ptr, stat_ptr, head_out_ptr, head, SPLITS, GROUP, GROUP_POWER, HEAD_DIM)
