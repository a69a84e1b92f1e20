"""Query and key norm, rotary embedding and the write to the paged cache, in one kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from runners.models.fused.kernels.dependent_launch import start_next, wait_for_previous


@triton.jit
def rotate_heads(
    x_ptr,
    at,  # [heads] offset of each head
    mask,  # [heads]
    norm_ptr,
    cos_sin_ptr,  # of this token: [HEAD_DIM / 2] cosines, then the sines, float32
    eps,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """`[heads, HEAD_DIM]` float32: heads normed and rotated. Dimension d turns with d + HEAD_DIM / 2."""
    half: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, HEAD_DIM)
    partner_d = (d + half) % HEAD_DIM
    x = tl.load(x_ptr + at[:, None] + d[None, :], mask=mask[:, None], other=0.0).to(tl.float32)
    partner = tl.load(x_ptr + at[:, None] + partner_d[None, :], mask=mask[:, None], other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        x = x * scale * tl.load(norm_ptr + d).to(tl.float32)[None, :]
        partner = partner * scale * tl.load(norm_ptr + partner_d).to(tl.float32)[None, :]
    cos = tl.load(cos_sin_ptr + d % half)
    sin = tl.load(cos_sin_ptr + half + d % half)
    return x * cos[None, :] + tl.where(d < half, -1.0, 1.0)[None, :] * partner * sin[None, :]


@triton.jit
def qk_rope_cache_kernel(
    qkv_ptr,  # [num_tokens, (GROUP + 2) * NUM_KV_HEADS, HEAD_DIM]
    q_norm_ptr,  # [HEAD_DIM]
    k_norm_ptr,  # [HEAD_DIM]
    cos_sin_ptr,  # [max_positions, HEAD_DIM] float32
    positions_ptr,  # [num_tokens] int64
    slots_ptr,  # [num_tokens] int64: where k and v go, in tokens
    q_ptr,  # [num_tokens, GROUP * NUM_KV_HEADS, HEAD_DIM] out
    k_ptr,  # [num_slots, NUM_KV_HEADS, HEAD_DIM] out: a cache, or plain rows with slots = row numbers
    v_ptr,  # as k
    eps,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start_next(PDL)
    d = tl.arange(0, HEAD_DIM)
    g = tl.arange(0, GROUP_BLOCK)
    # Positions and slots are inputs of the step: no kernel after the embedding writes them.
    cos_sin = cos_sin_ptr + tl.load(positions_ptr + token) * HEAD_DIM
    slot = token
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + token)
    wait_for_previous(PDL)
    token_ptr = qkv_ptr + token * (GROUP + 2) * NUM_KV_HEADS * HEAD_DIM
    at = (kv_head * GROUP + g) * HEAD_DIM
    q = rotate_heads(token_ptr, at, g < GROUP, q_norm_ptr, cos_sin, eps, HEAD_DIM, HAS_NORM)
    q_at = token * GROUP * NUM_KV_HEADS * HEAD_DIM + at[:, None] + d[None, :]
    tl.store(q_ptr + q_at, q.to(q_ptr.dtype.element_ty), mask=(g < GROUP)[:, None])

    one = tl.arange(0, 1)
    k_at = (GROUP * NUM_KV_HEADS + kv_head + one) * HEAD_DIM
    k = rotate_heads(token_ptr, k_at, one == 0, k_norm_ptr, cos_sin, eps, HEAD_DIM, HAS_NORM)
    v = tl.load(token_ptr + ((GROUP + 1) * NUM_KV_HEADS + kv_head) * HEAD_DIM + d)
    out_at = (slot * NUM_KV_HEADS + kv_head) * HEAD_DIM + d
    tl.store(k_ptr + out_at[None, :], k.to(k_ptr.dtype.element_ty))
    tl.store(v_ptr + out_at, v.to(v_ptr.dtype.element_ty))
