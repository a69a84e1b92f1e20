"""Decode attention over the paged cache, each warp with a stripe of the tokens and a softmax of its own.

A program serves `HEADS` key heads of one request over one of `SPLITS` spans of its past. A turn of its
loop takes `WAYS * BLOCK` tokens: the leading axis of every tile is `HEADS * WAYS` stripes, which the
tensor cores' products spread over warps, so that no turn waits for another warp but for the loads. The
keys are the tall side of the product, the query heads (`GROUP_BLOCK`) the narrow one.

Loads of the first turns are queued ahead of the wait for the kernel before: the wait stands within the
first turn, and the pipeline of `STAGES` fills in front of it. The page ids of a turn are read a turn
ahead, so that no load of keys waits for them.

With `FUSED` the kernel starts from the raw projections: it norms and rotates the query and the new key,
writes new key and value to the cache, and takes them into the softmax from registers, so that no
program reads what another one of this kernel writes. The last program of a span to finish adds up the
partial results in a fixed order (an integer counter says who is last): the bits do not depend on timing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runners.models.fused.kernels.dependent_launch import prefetch_tokens, start_next, wait_for_previous
from runners.models.fused.kernels.epilogue import arrives_last

#: Stands for minus infinity, finite so that a difference of two is not NaN.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def log2_scores(scores, sm_scale, SOFT_CAP: tl.constexpr):
    """Scores in units of log2(e), capped where the model asks for it."""
    scores *= sm_scale
    if SOFT_CAP > 0:
        scores = SOFT_CAP * (2.0 * tl.sigmoid(2.0 * scores / SOFT_CAP) - 1.0)
    return scores * 1.4426950408889634


@triton.jit
def load_norm(norm_ptr, d, HAS_NORM: tl.constexpr):
    if HAS_NORM:  # noqa: SIM108 (Triton takes no conditional expression of tensors)
        weight = tl.load(norm_ptr + d).to(tl.float32)
    else:
        weight = tl.full([d.shape[0]], 1.0, tl.float32)
    return weight


@triton.jit
def rotate(x, partner, weight, partner_weight, cos, sin, eps, HAS_NORM: tl.constexpr):
    """`[rows, HEAD_DIM]` float32, normed and rotated; `partner` holds the dimension each one turns with."""
    x, partner = x.to(tl.float32), partner.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / x.shape[1] + eps)[:, None]
        x = x * scale * weight[None, :]
        partner = partner * scale * partner_weight[None, :]
    return x * cos[None, :] + partner * sin[None, :]


@triton.jit
def over_ways(x, WAYS: tl.constexpr):
    """`[HEADS, a, b]` → `[WAYS * HEADS, a, b]`."""
    wide = tl.broadcast_to(x[None, :, :, :], [WAYS, x.shape[0], x.shape[1], x.shape[2]])
    return tl.reshape(wide, [WAYS * x.shape[0], x.shape[1], x.shape[2]])


@triton.jit
def attend_turn(q, k, v, mask, top, total, acc, sm_scale, SOFT_CAP: tl.constexpr):
    """Take `[stripes, BLOCK]` tokens into the running softmax of each stripe."""
    scores = log2_scores(tl.dot(k, q, input_precision="ieee"), sm_scale, SOFT_CAP)
    scores = tl.where(mask[:, :, None], scores, LOWEST)
    higher = tl.maximum(top, tl.max(scores, axis=1))
    rescale = tl.exp2(top - higher)
    p = tl.exp2(scores - higher[:, None, :])
    total = total * rescale + tl.sum(p, axis=1)
    acc = tl.dot(v, p.to(v.dtype), acc * rescale[:, None, :], input_precision="ieee")
    return higher, total, acc


@triton.jit
def merge_ways(top, total, acc, WAYS: tl.constexpr, HEADS: tl.constexpr):
    """`[HEADS, ...]`: the stripes of one head as one softmax."""
    top = tl.reshape(top, [WAYS, HEADS, top.shape[1]])
    total = tl.reshape(total, [WAYS, HEADS, total.shape[1]])
    acc = tl.reshape(acc, [WAYS, HEADS, acc.shape[1], acc.shape[2]])
    higher = tl.max(top, axis=0)
    weight = tl.exp2(top - higher[None, :, :])
    return higher, tl.sum(total * weight, axis=0), tl.sum(acc * weight[:, :, None, :], axis=0)


@triton.jit
def merge_spans(
    part_ptr, stat_ptr, out_ptr, first_head, used, SPLITS: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, GROUP_POWER: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of `HEADS` key heads. `.cg`: the L1 cache may hold an older layer's."""
    row, d = tl.arange(0, HEADS * GROUP_POWER), tl.arange(0, HEAD_DIM)
    head, g = first_head + row // GROUP_POWER, row % GROUP_POWER
    top = tl.full([HEADS * GROUP_POWER], LOWEST, tl.float32)
    for s in tl.static_range(SPLITS):
        at = (head * SPLITS + s) * 2 * GROUP + g
        mask = (g < GROUP) & (s < used)
        top = tl.maximum(top, tl.load(stat_ptr + at, mask=mask, other=LOWEST, cache_modifier=".cg"))
    total = tl.zeros([HEADS * GROUP_POWER], tl.float32)
    acc = tl.zeros([HEADS * GROUP_POWER, HEAD_DIM], tl.float32)
    for s in tl.static_range(SPLITS):
        at = (head * SPLITS + s) * 2 * GROUP + g
        mask = (g < GROUP) & (s < used)
        weight = tl.exp2(tl.load(stat_ptr + at, mask=mask, other=LOWEST, cache_modifier=".cg") - top)
        total += weight * tl.load(stat_ptr + at + GROUP, mask=mask, other=0.0, cache_modifier=".cg")
        part_at = ((head * SPLITS + s) * GROUP + g)[:, None] * HEAD_DIM + d[None, :]
        part = tl.load(part_ptr + part_at, mask=mask[:, None], other=0.0, cache_modifier=".cg")
        acc += weight[:, None] * part
    out = acc / tl.where(g < GROUP, total, 1.0)[:, None]
    out_at = (head.to(tl.int64) * GROUP + g)[:, None] * HEAD_DIM + d[None, :]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=(g < GROUP)[:, None])


@triton.jit
def striped_attention_kernel(
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
    HEADS: tl.constexpr,
    WAYS: tl.constexpr,
    BLOCK: tl.constexpr,
    MIN_SPAN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    head_block, split, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    stripe = tl.arange(0, WAYS * HEADS)
    kv_head, way = head_block * HEADS + stripe % HEADS, stripe // HEADS
    d = tl.arange(0, HEAD_DIM)
    start_next(PDL)
    # Lengths, pages and slots are inputs of the step: no kernel after the embedding writes them.
    seq_len = tl.load(seq_lens_ptr + request)
    pages = page_table_ptr + tl.load(request_ptr + request).to(tl.int64) * page_table_stride
    past = seq_len - 1 if FUSED else seq_len
    oldest = tl.maximum(seq_len - WINDOW, 0) if WINDOW > 0 else 0
    # A block that starts at a multiple of its size lies in one page, if pages are as large.
    ONE_PAGE: tl.constexpr = PAGE_SIZE % BLOCK == 0
    start = oldest // BLOCK * BLOCK
    # Spans are whole turns, and not shorter than is worth a merge: the last programs may have nothing to do.
    TURN: tl.constexpr = WAYS * BLOCK
    span = tl.maximum(tl.cdiv(tl.cdiv(past - start, SPLITS), TURN) * TURN, MIN_SPAN)
    used = tl.maximum(tl.cdiv(past - start, span), 1)
    if split >= used:
        wait_for_previous(PDL)
        return
    begin = start + split * span
    end = tl.minimum(past, begin + span)
    # One turn at least, if only to wait: no program may leave the wait out.
    turns = tl.maximum(tl.cdiv(end - begin, TURN), 1)

    half: tl.constexpr = HEAD_DIM // 2
    row = tl.arange(0, HEADS * GROUP_BLOCK)
    row_g, row_head = row % GROUP_BLOCK, head_block * HEADS + row // GROUP_BLOCK
    q_at = (row_head * GROUP + row_g)[:, None] * HEAD_DIM
    mask_q = (row_g < GROUP)[:, None]
    new_head = head_block * HEADS + tl.arange(0, HEADS)
    partner = (d + half) % HEAD_DIM
    if FUSED:
        token_ptr = q_ptr + request.to(tl.int64) * (GROUP + 2) * NUM_KV_HEADS * HEAD_DIM
        cos_sin = cos_sin_ptr + (seq_len - 1).to(tl.int64) * HEAD_DIM
        if PDL:
            # What only this layer reads would come from memory after the wait.
            one = tl.arange(0, 1)
            prefetch_tokens(cos_sin, one, one == 0, 2 * HEAD_DIM)
            if HAS_NORM:
                prefetch_tokens(q_norm_ptr, one, one == 0, HEAD_DIM)
                prefetch_tokens(k_norm_ptr, one, one == 0, HEAD_DIM)
    else:
        token_ptr = q_ptr + request.to(tl.int64) * GROUP * NUM_KV_HEADS * HEAD_DIM

    q = tl.zeros([WAYS * HEADS, HEAD_DIM, GROUP_BLOCK], q_ptr.dtype.element_ty)
    top = tl.full([WAYS * HEADS, GROUP_BLOCK], LOWEST, tl.float32)
    total = tl.zeros([WAYS * HEADS, GROUP_BLOCK], tl.float32)
    acc = tl.zeros([WAYS * HEADS, HEAD_DIM, GROUP_BLOCK], tl.float32)
    within = tl.arange(0, BLOCK)[None, :]
    if ONE_PAGE:  # noqa: SIM108 (Triton takes no conditional expression of tensors)
        paged = tl.zeros([1, 1], tl.int32)
    else:
        paged = within
    stripe_at = begin + (way * BLOCK)[:, None]
    page = tl.load(pages + (stripe_at + paged) // PAGE_SIZE, mask=stripe_at + paged < end, other=0)
    for turn in tl.range(0, turns, num_stages=STAGES):
        token = stripe_at + turn * TURN
        mask = token + within < end
        if WINDOW > 0:
            mask = mask & (token + within >= oldest)
        slots = page * PAGE_SIZE + (token + paged) % PAGE_SIZE
        at = (slots * NUM_KV_HEADS + kv_head[:, None]).to(tl.int64) * HEAD_DIM
        if ONE_PAGE:
            at = at + within * (NUM_KV_HEADS * HEAD_DIM)
        # Masked values are zero, never what the cache holds there: 0 * NaN would be NaN.
        k = tl.load(k_cache_ptr + at[:, :, None] + d[None, None, :], mask=mask[:, :, None], other=0.0)
        # Transposed as it is read: a permuted tile would not take the way through shared memory.
        v = tl.load(v_cache_ptr + at[:, None, :] + d[None, :, None], mask=mask[:, None, :], other=0.0)
        following = token + TURN + paged
        page = tl.load(pages + following // PAGE_SIZE, mask=following < end, other=0)
        if turn == 0:
            wait_for_previous(PDL)
            x = tl.load(token_ptr + q_at + d[None, :], mask=mask_q, other=0.0)
            if FUSED:
                x2 = tl.load(token_ptr + q_at + partner[None, :], mask=mask_q, other=0.0)
                k_at = (GROUP * NUM_KV_HEADS + new_head)[:, None] * HEAD_DIM
                new_k = tl.load(token_ptr + k_at + d[None, :])
                new_k2 = tl.load(token_ptr + k_at + partner[None, :])
                new_v = tl.load(token_ptr + k_at + NUM_KV_HEADS * HEAD_DIM + d[None, :])
                cos = tl.load(cos_sin + d % half)
                sin = tl.load(cos_sin + half + d % half) * tl.where(d < half, -1.0, 1.0)
                q_weight = load_norm(q_norm_ptr, d, HAS_NORM)
                q_weight2 = load_norm(q_norm_ptr, partner, HAS_NORM)
                k_weight = load_norm(k_norm_ptr, d, HAS_NORM)
                k_weight2 = load_norm(k_norm_ptr, partner, HAS_NORM)
                slot = tl.load(slots_ptr + request)
                x = rotate(x, x2, q_weight, q_weight2, cos, sin, eps, HAS_NORM).to(q_ptr.dtype.element_ty)
                new_k = rotate(new_k, new_k2, k_weight, k_weight2, cos, sin, eps, HAS_NORM)
                new_k = new_k.to(k_cache_ptr.dtype.element_ty)
                new_v = new_v.to(v_cache_ptr.dtype.element_ty)
                new_at = (slot * NUM_KV_HEADS + new_head)[:, None] * HEAD_DIM + d[None, :]
                first = split == 0
                tl.store(k_cache_ptr + new_at, new_k, mask=first)
                tl.store(v_cache_ptr + new_at, new_v, mask=first)
                heads = tl.reshape(x, [HEADS, GROUP_BLOCK, HEAD_DIM])
                score = tl.sum(heads.to(tl.float32) * new_k.to(tl.float32)[:, None, :], axis=2)
                score = log2_scores(score, sm_scale, SOFT_CAP)
                # The new token belongs to the first way of the first span.
                owns = ((way == 0) & first)[:, None]
                wide_score = over_ways(score[:, None, :], WAYS)
                top = tl.where(owns, tl.reshape(wide_score, [WAYS * HEADS, GROUP_BLOCK]), LOWEST)
                total = tl.where(owns, 1.0, 0.0) + tl.zeros([WAYS * HEADS, GROUP_BLOCK], tl.float32)
                wide_v = over_ways(new_v.to(tl.float32)[:, :, None], WAYS)
                acc = tl.where(owns[:, :, None], wide_v, 0.0) + tl.zeros(
                    [WAYS * HEADS, HEAD_DIM, GROUP_BLOCK], tl.float32
                )
            heads = tl.reshape(x, [HEADS, GROUP_BLOCK, HEAD_DIM])
            q = over_ways(tl.permute(heads, (0, 2, 1)), WAYS)
        # With a narrower cache the products are of the query's type.
        k, v = k.to(q.dtype), v.to(q.dtype)
        top, total, acc = attend_turn(q, k, v, mask, top, total, acc, sm_scale, SOFT_CAP)

    top, total, acc = merge_ways(top, total, acc, WAYS, HEADS)
    head = request * NUM_KV_HEADS + new_head
    g = tl.arange(0, GROUP_BLOCK)
    if used == 1:
        out = tl.permute(acc / tl.where(g < GROUP, total, 1.0)[:, None, :], (0, 2, 1))
        out_at = (head.to(tl.int64)[:, None] * GROUP + g[None, :])[:, :, None] * HEAD_DIM + d[None, None, :]
        tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=(g < GROUP)[None, :, None])
    elif SPLITS > 1:
        mask_g = (g < GROUP)[None, :]
        part_row = (head * SPLITS + split)[:, None]
        part_at = (part_row * GROUP + g[None, :])[:, :, None] * HEAD_DIM + d[None, None, :]
        tl.store(part_ptr + part_at, tl.permute(acc, (0, 2, 1)), mask=mask_g[:, :, None])
        stat_at = part_row * 2 * GROUP + g[None, :]
        tl.store(stat_ptr + stat_at, top, mask=mask_g)
        tl.store(stat_ptr + stat_at + GROUP, total, mask=mask_g)
        first_head = request * NUM_KV_HEADS + head_block * HEADS
        if arrives_last(counter_ptr + first_head, used):
            merge_spans(part_ptr, stat_ptr, out_ptr, first_head, used, SPLITS, HEADS, GROUP, GROUP_POWER,
                        HEAD_DIM)  # fmt: skip
