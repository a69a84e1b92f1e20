"""RMSNorm, and the sums of squares that a scaled product needs: a program a row."""

from __future__ import annotations

import triton
import triton.language as tl

from runners.models.fused.kernels.dependent_launch import start_next, wait_for_previous


@triton.jit
def rms_norm_kernel(
    x_ptr,  # [num_rows, size]
    weight_ptr,  # [size], with HAS_WEIGHT
    out_ptr,  # [num_rows, size] out
    size,
    eps,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    start_next(PDL)
    weight = tl.load(weight_ptr + columns, mask=mask & HAS_WEIGHT, other=1.0).to(tl.float32)
    wait_for_previous(PDL)
    at = tl.program_id(0).to(tl.int64) * size + columns
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    tl.store(out_ptr + at, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def row_squares_kernel(
    x_ptr,  # [num_rows, size]
    out_ptr,  # [num_rows, 1] float32 out
    size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    start_next(PDL)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row.to(tl.int64) * size + columns, mask=columns < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, tl.sum(x * x, axis=0))


@triton.jit
def embed_kernel(
    ids_ptr,  # [num_rows] int64
    source_ptr,  # [num_rows] int32 rows of sampled, negative for none, with HAS_SOURCE
    sampled_ptr,  # [>= num_rows] int64, with HAS_SOURCE
    table_ptr,  # [vocab_size, size]
    out_ptr,  # [num_rows, size] out
    squares_ptr,  # [num_rows, 1] float32 out
    size,
    HAS_SOURCE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    start_next(PDL)
    wait_for_previous(PDL)
    token = tl.load(ids_ptr + row)
    if HAS_SOURCE:
        source = tl.load(source_ptr + row)
        fed = tl.load(sampled_ptr + tl.maximum(source, 0))
        token = tl.where(source >= 0, fed, token)
    x = tl.load(table_ptr + token * size + columns, mask=mask, other=0.0)
    tl.store(out_ptr + row.to(tl.int64) * size + columns, x, mask=mask)
    wide = x.to(tl.float32)
    tl.store(squares_ptr + row, tl.sum(wide * wide, axis=0))
