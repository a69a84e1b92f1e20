"""What the product kernels share: the row scale of a norm, partial sums and their end."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_scale(squares_ptr, rows, mask_m, num_parts, k, eps, PARTS_BLOCK: tl.constexpr):
    """`1 / rms` of each row of the input, from the partial sums of squares `[num_rows, num_parts]`."""
    part = tl.arange(0, PARTS_BLOCK)
    mask = mask_m[:, None] & (part < num_parts)[None, :]
    squares = tl.load(squares_ptr + rows[:, None] * num_parts + part[None, :], mask=mask, other=0.0)
    return tl.rsqrt(tl.sum(squares, axis=1) / k + eps)


@triton.jit
def arrives_last(counter_ptr, num_programs):
    """Announce this program's stores; True for the last of `num_programs`, which sees all of theirs.

    The counter is zero before and after.
    """
    # All threads' stores must be done before one thread announces them.
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == num_programs - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit
def add_parts(part_ptr, at, mask, size, SPLITS: tl.constexpr, SILU: tl.constexpr):
    """Sum the partial results in order: the product, and with SILU the second one (else the same again).

    `.cg`: the L1 cache may hold what an older layer left there.
    """
    KINDS: tl.constexpr = 2 if SILU else 1
    acc = tl.load(part_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
    for s in tl.static_range(1, SPLITS):
        acc += tl.load(part_ptr + s * KINDS * size + at, mask=mask, other=0.0, cache_modifier=".cg")
    acc_up = acc
    if SILU:
        acc_up = tl.load(part_ptr + size + at, mask=mask, other=0.0, cache_modifier=".cg")
        for s in tl.static_range(1, SPLITS):
            up_part = part_ptr + (s * KINDS + 1) * size + at
            acc_up += tl.load(up_part, mask=mask, other=0.0, cache_modifier=".cg")
    return acc, acc_up


@triton.jit
def store_best(out, columns, mask_n, max_ptr, arg_ptr, at, mask_m, n):
    """Largest value of each row of this tile `[rows, columns]`, and its first column."""
    out = tl.where(mask_n[None, :], out.to(tl.float32), float("-inf"))
    best = tl.max(out, axis=1)
    first = tl.min(tl.where(out == best[:, None], columns[None, :], n - 1), axis=1)
    tl.store(max_ptr + at, best, mask=mask_m)
    tl.store(arg_ptr + at, first, mask=mask_m)


@triton.jit
def finish_tile(
    acc,  # [rows, columns] float32
    acc_up,
    scale,  # [rows]
    rows,
    columns,
    mask_m,
    mask_n,
    tile_n,
    num_tiles,
    bias_ptr,
    residual_ptr,
    out_ptr,
    squares_out_ptr,
    max_ptr,
    arg_ptr,
    n,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SILU: tl.constexpr,
    ARGMAX: tl.constexpr,
):
    """Everything after the product: scale, bias, SiLU or residual, the store, and what the next one needs."""
    if SCALED:
        acc = acc * scale[:, None]
        acc_up = acc_up * scale[:, None]
    if SILU:
        acc = acc * tl.sigmoid(acc) * acc_up
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    at = rows.to(tl.int64)[:, None] * n + columns[None, :]
    mask = mask_m[:, None] & mask_n[None, :]
    if HAS_RESIDUAL:
        acc += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, mask=mask)
    stat_at = rows * num_tiles + tile_n
    if HAS_RESIDUAL:
        wide = tl.where(mask, out.to(tl.float32), 0.0)
        tl.store(squares_out_ptr + stat_at, tl.sum(wide * wide, axis=1), mask=mask_m)
    if ARGMAX:
        store_best(out, columns, mask_n, max_ptr, arg_ptr, stat_at, mask_m, n)
