"""Matrix times one vector, by plain multiply-adds: the same product as `skinny_gemm`, for one row.

A tile of the weight is loaded straight into registers, the first one ahead of the wait for the
kernel before: then the wait costs no memory time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runners.models.fused.kernels.dependent_launch import prefetch_rows, start_next, wait_for_previous
from runners.models.fused.kernels.epilogue import arrives_last, finish_tile, row_scale


@triton.jit(do_not_specialize=["num_squares"])
def gemv_kernel(
    x_ptr,  # [1, k]
    squares_ptr,  # [1, num_squares] float32, with SCALED
    w_ptr,  # [n, k], or [2 * n, k] with SILU: gate rows, then up rows
    bias_ptr,  # [n]
    residual_ptr,  # [1, n]
    out_ptr,  # [1, n]
    squares_out_ptr,  # [1, num_tiles] float32 out, with HAS_RESIDUAL
    max_ptr,  # [1, num_tiles] float32 out, with ARGMAX
    arg_ptr,  # [1, num_tiles] int32 out, with ARGMAX
    part_ptr,  # [SPLITS, 1 or 2 with SILU, 1, n] float32, with SPLITS > 1
    counter_ptr,  # [num_tiles] int32, zero before and after
    num_squares,
    n,
    k,
    k_per_split,
    eps,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    PREFETCH: tl.constexpr,
    SQUARES_BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SILU: tl.constexpr,
    ARGMAX: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    tile_n, split = tl.program_id(0), tl.program_id(1)
    num_tiles = tl.num_programs(0)
    row = tl.arange(0, 1)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = columns < n
    lanes = tl.arange(0, BLOCK_K)
    k_begin = split * k_per_split
    k_end = tl.minimum(k, k_begin + k_per_split)
    start_next(PDL)
    w_ptrs = w_ptr + columns.to(tl.int64)[:, None] * k + lanes[None, :]
    up_offset = n.to(tl.int64) * k
    first = mask_n[:, None] & (k_begin + lanes < k_end)[None, :]
    w_next = tl.load(w_ptrs + k_begin, mask=first, other=0.0)
    up_next = w_next
    if SILU:
        up_next = tl.load(w_ptrs + up_offset + k_begin, mask=first, other=0.0)
    if PDL and PREFETCH > 0:
        ahead = k_begin + BLOCK_K
        until = tl.minimum(k_end, ahead + PREFETCH)
        prefetch_rows(w_ptr, tile_n * BLOCK_N, n, k, ahead, until, BLOCK_N, PARTS)
        if SILU:
            prefetch_rows(w_ptr, n + tile_n * BLOCK_N, 2 * n, k, ahead, until, BLOCK_N, PARTS)
    wait_for_previous(PDL)

    x_next = tl.load(x_ptr + k_begin + lanes, mask=k_begin + lanes < k_end, other=0.0)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for begin in range(k_begin, k_end, BLOCK_K):
        w, up, x = w_next, up_next, x_next.to(tl.float32)[None, :]
        ks = begin + BLOCK_K + lanes
        following = mask_n[:, None] & (ks < k_end)[None, :]
        w_next = tl.load(w_ptrs + begin + BLOCK_K, mask=following, other=0.0)
        if SILU:
            up_next = tl.load(w_ptrs + up_offset + begin + BLOCK_K, mask=following, other=0.0)
        x_next = tl.load(x_ptr + ks, mask=ks < k_end, other=0.0)
        acc += w.to(tl.float32) * x
        if SILU:
            acc_up += up.to(tl.float32) * x

    total = tl.sum(acc, axis=1)
    total_up = total
    if SILU:
        total_up = tl.sum(acc_up, axis=1)
    scale = 0.0 * row
    mask_m = row < 1
    if SPLITS == 1:
        if SCALED:
            scale = row_scale(squares_ptr, row, mask_m, num_squares, k, eps, SQUARES_BLOCK)
        finish_tile(
            total[None, :], total_up[None, :], scale, row, columns, mask_m, mask_n, tile_n, num_tiles,
            bias_ptr, residual_ptr, out_ptr, squares_out_ptr, max_ptr, arg_ptr, n,
            SCALED, HAS_BIAS, HAS_RESIDUAL, SILU, ARGMAX,
        )  # fmt: skip
    else:
        KINDS: tl.constexpr = 2 if SILU else 1
        tl.store(part_ptr + split * KINDS * n + columns, total, mask=mask_n)
        if SILU:
            tl.store(part_ptr + (split * KINDS + 1) * n + columns, total_up, mask=mask_n)
        if arrives_last(counter_ptr + tile_n, SPLITS):
            # `.cg`: the L1 cache may hold what an older layer left there.
            total = tl.load(part_ptr + columns, mask=mask_n, other=0.0, cache_modifier=".cg")
            for s in tl.static_range(1, SPLITS):
                total += tl.load(
                    part_ptr + s * KINDS * n + columns, mask=mask_n, other=0.0, cache_modifier=".cg"
                )
            total_up = total
            if SILU:
                total_up = tl.load(part_ptr + n + columns, mask=mask_n, other=0.0, cache_modifier=".cg")
                for s in tl.static_range(1, SPLITS):
                    up_part = part_ptr + (s * KINDS + 1) * n + columns
                    total_up += tl.load(up_part, mask=mask_n, other=0.0, cache_modifier=".cg")
            if SCALED:
                scale = row_scale(squares_ptr, row, mask_m, num_squares, k, eps, SQUARES_BLOCK)
            finish_tile(
                total[None, :], total_up[None, :], scale, row, columns, mask_m, mask_n, tile_n, num_tiles,
                bias_ptr, residual_ptr, out_ptr, squares_out_ptr, max_ptr, arg_ptr, n,
                SCALED, HAS_BIAS, HAS_RESIDUAL, SILU, ARGMAX,
            )  # fmt: skip
