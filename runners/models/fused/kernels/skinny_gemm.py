"""GEMM of few rows with a wide weight: bound by reading the weight once.

`out = f(scale * (x @ w.T) + bias)`: the scale is that of an RMSNorm whose weight is folded into w, and
comes from sums of squares that the kernel before left; f is SiLU-and-multiply, or adding the residual,
or the arg max of each tile.

The first `BLOCK_AHEAD` columns of a tile of the weight are loaded ahead of the wait for the kernel
before, so that the wait costs no memory time. With split-K the last program of a tile to arrive adds up the
partial sums in order: no floating-point atomics, the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runners.models.fused.kernels.dependent_launch import prefetch_rows, start_next, wait_for_previous
from runners.models.fused.kernels.epilogue import add_parts, arrives_last, finish_tile, row_scale


@triton.jit
def load_weight(w_ptr, w_at, mask_n, begin, k_end, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):
    ks = begin + tl.arange(0, BLOCK_K)
    at = w_ptr + w_at[:, None] + ks[None, :]
    if EVEN:  # noqa: SIM108 (Triton takes no conditional expression of tensors)
        w = tl.load(at)
    else:
        w = tl.load(at, mask=mask_n[:, None] & (ks < k_end)[None, :], other=0.0)
    return w


@triton.jit
def load_rows(x_ptr, row_at, mask_m, begin, k_end, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):
    ks = begin + tl.arange(0, BLOCK_K)
    mask = mask_m[:, None]
    if not EVEN:
        mask = mask & (ks < k_end)[None, :]
    return tl.load(x_ptr + row_at[:, None] + ks[None, :], mask=mask, other=0.0)


@triton.jit
def multiply(x, w, acc, SWAP: tl.constexpr):
    """`acc += x @ w.T`, or its transpose with SWAP: then the weight's rows are the tall side."""
    if SWAP:
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    else:
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_rows", "num_squares"])
def skinny_gemm_kernel(
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
    BLOCK_AHEAD: tl.constexpr,
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
    # One load, however long: a second one would wait for the first on its way to shared memory.
    if BLOCK_AHEAD > 0:
        w0 = load_weight(w_ptr, w_at, mask_n, k_begin, k_end, BLOCK_AHEAD, EVEN)
        if SILU:
            u0 = load_weight(w_ptr, up_at, mask_n, k_begin, k_end, BLOCK_AHEAD, EVEN)
    loop_begin = k_begin + BLOCK_AHEAD
    if PDL and PREFETCH > 0:
        until = tl.minimum(k_end, loop_begin + PREFETCH)
        prefetch_rows(w_ptr, tile_n * BLOCK_N, n, k, loop_begin, until, BLOCK_N, PARTS)
        if SILU:
            prefetch_rows(w_ptr, n + tile_n * BLOCK_N, 2 * n, k, loop_begin, until, BLOCK_N, PARTS)
    wait_for_previous(PDL)

    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    acc_up = acc
    if BLOCK_AHEAD > 0:
        x0 = load_rows(x_ptr, row_at, mask_m, k_begin, k_end, BLOCK_AHEAD, EVEN)
        acc = multiply(x0, w0, acc, SWAP)
        if SILU:
            acc_up = multiply(x0, u0, acc_up, SWAP)
    if STAGES > 0:
        for begin in tl.range(loop_begin, k_end, BLOCK_K, num_stages=STAGES):
            w = load_weight(w_ptr, w_at, mask_n, begin, k_end, BLOCK_K, EVEN)
            x = load_rows(x_ptr, row_at, mask_m, begin, k_end, BLOCK_K, EVEN)
            acc = multiply(x, w, acc, SWAP)
            if SILU:
                up = load_weight(w_ptr, up_at, mask_n, begin, k_end, BLOCK_K, EVEN)
                acc_up = multiply(x, up, acc_up, SWAP)
    if SWAP:
        acc = tl.trans(acc)
        acc_up = tl.trans(acc_up)
    scale = 0.0 * rows
    if SPLITS == 1:
        if SCALED:
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
