"""GEMM of few rows with a wide weight, the first turns of the weight in flight before the wait.

Computes what `skinny_gemm` does. The loop's weight tiles come by asynchronous copies, `STAGES - 1` turns
ahead, and the wait for the kernel before stands within the first turn: so the pipeline fills with the weight
while that kernel still runs, in shared memory where the tensor cores read it. The rows, which that kernel may
have written, are read a turn ahead into registers. `PREFETCH` columns behind those turns go to the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runners.models.fused.kernels.dependent_launch import prefetch_rows, start_next, wait_for_previous
from runners.models.fused.kernels.epilogue import add_parts, arrives_last, finish_tile, row_scale
from runners.models.fused.kernels.skinny_gemm import load_weight, multiply


@triton.jit
def load_turn(x_ptr, row_at, mask_m, begin, k_end, BLOCK_K: tl.constexpr):
    """A turn's rows; zeros past the end, where nothing may be read."""
    ks = begin + tl.arange(0, BLOCK_K)
    return tl.load(
        x_ptr + row_at[:, None] + ks[None, :], mask=mask_m[:, None] & (ks < k_end)[None, :], other=0.0
    )


@triton.jit(do_not_specialize=["num_rows", "num_squares"])
def streamed_gemm_kernel(
    x_ptr,  # [num_rows, k]
    squares_ptr,  # [num_rows, num_squares] float32: sums of squares of parts of x's rows, with SCALED
    w_ptr,  # [n, k], or [2 * n, k] with SILU: gate rows, then up rows
    bias_ptr,  # [n]
    residual_ptr,  # [num_rows, n]
    out_ptr,  # [num_rows, n]
    squares_out_ptr,  # [num_rows, num_tiles] float32 out, with HAS_RESIDUAL
    max_ptr,  # [num_rows, num_tiles] float32 out, with ARGMAX
    arg_ptr,  # [num_rows, num_tiles] int32 out, with ARGMAX
    part_ptr,  # [SPLITS, 1 or 2 with SILU, num_rows, n] float32, with SPLITS > 1
    counter_ptr,  # [row tiles * num_tiles] int32, zero before and after
    num_rows,
    num_squares,
    n,
    k,
    k_per_split,
    eps,
    BLOCK_M: tl.constexpr,
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
    EVEN: tl.constexpr,
    SWAP: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    tile_n, split, tile_m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_tiles = tl.num_programs(0)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = rows < num_rows, columns < n
    k_begin = split * k_per_split
    k_end = tl.minimum(k, k_begin + k_per_split)
    row_at = rows.to(tl.int64) * k
    w_at = columns.to(tl.int64) * k
    up_at = w_at + n.to(tl.int64) * k
    start_next(PDL)

    # The row scale's terms are asked for with the first rows, if they fit: their way is as long.
    EARLY_SQUARES: tl.constexpr = SCALED and SPLITS == 1 and BLOCK_M * SQUARES_BLOCK <= 4096
    part = tl.arange(0, SQUARES_BLOCK)
    squares_at = squares_ptr + rows[:, None] * num_squares + part[None, :]
    mask_squares = mask_m[:, None] & (part < num_squares)[None, :]
    squares = tl.zeros([BLOCK_M, SQUARES_BLOCK] if EARLY_SQUARES else [1, 1], tl.float32)
    x = tl.zeros([BLOCK_M, BLOCK_K], x_ptr.dtype.element_ty)
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    acc_up = acc
    # One turn at least, if only to wait: no program may leave the wait out.
    turns = tl.maximum(tl.cdiv(k_end - k_begin, BLOCK_K), 1)
    for turn in tl.range(0, turns, num_stages=STAGES):
        begin = k_begin + turn * BLOCK_K
        w = load_weight(w_ptr, w_at, mask_n, begin, k_end, BLOCK_K, EVEN)
        if SILU:
            up = load_weight(w_ptr, up_at, mask_n, begin, k_end, BLOCK_K, EVEN)
        if turn == 0:
            if PDL and PREFETCH > 0:
                from_k = k_begin + (STAGES - 1) * BLOCK_K
                until = tl.minimum(k_end, from_k + PREFETCH)
                prefetch_rows(w_ptr, tile_n * BLOCK_N, n, k, from_k, until, BLOCK_N, PARTS)
                if SILU:
                    prefetch_rows(w_ptr, n + tile_n * BLOCK_N, 2 * n, k, from_k, until, BLOCK_N, PARTS)
            wait_for_previous(PDL)
            x = load_turn(x_ptr, row_at, mask_m, begin, k_end, BLOCK_K)
            if EARLY_SQUARES:
                squares = tl.load(squares_at, mask=mask_squares, other=0.0)
        following = load_turn(x_ptr, row_at, mask_m, begin + BLOCK_K, k_end, BLOCK_K)
        acc = multiply(x, w, acc, SWAP)
        if SILU:
            acc_up = multiply(x, up, acc_up, SWAP)
        x = following
    if SWAP:
        acc = tl.trans(acc)
        acc_up = tl.trans(acc_up)
    scale = 0.0 * rows
    if SPLITS == 1:
        if EARLY_SQUARES:
            scale = tl.rsqrt(tl.sum(squares, axis=1) / k + eps)
        elif SCALED:
            scale = row_scale(squares_ptr, rows, mask_m, num_squares, k, eps, SQUARES_BLOCK)
        finish_tile(
            acc, acc_up, scale, rows, columns, mask_m, mask_n, tile_n, num_tiles, bias_ptr, residual_ptr,
            out_ptr, squares_out_ptr, max_ptr, arg_ptr, n, SCALED, HAS_BIAS, HAS_RESIDUAL, SILU, ARGMAX,
        )  # fmt: skip
    else:
        KINDS: tl.constexpr = 2 if SILU else 1
        at = rows.to(tl.int64)[:, None] * n + columns[None, :]
        mask = mask_m[:, None] & mask_n[None, :]
        size = num_rows.to(tl.int64) * n
        tl.store(part_ptr + split * KINDS * size + at, acc, mask=mask)
        if SILU:
            tl.store(part_ptr + (split * KINDS + 1) * size + at, acc_up, mask=mask)
        if arrives_last(counter_ptr + tile_m * num_tiles + tile_n, SPLITS):
            acc, acc_up = add_parts(part_ptr, at, mask, size, SPLITS, SILU)
            if SCALED:
                scale = row_scale(squares_ptr, rows, mask_m, num_squares, k, eps, SQUARES_BLOCK)
            finish_tile(
                acc, acc_up, scale, rows, columns, mask_m, mask_n, tile_n, num_tiles, bias_ptr, residual_ptr,
                out_ptr, squares_out_ptr, max_ptr, arg_ptr, n, SCALED, HAS_BIAS, HAS_RESIDUAL, SILU, ARGMAX,
            )  # fmt: skip
