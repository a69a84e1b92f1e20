"""SiLU of the gate times the up projection."""

from __future__ import annotations

import triton
import triton.language as tl

from runners.models.fused.kernels.dependent_launch import start_next, wait_for_previous


@triton.jit(do_not_specialize=["num_squares"])
def silu_and_mul_kernel(
    gate_up_ptr,  # [num_rows, 2 * size]: gate, then up
    squares_ptr,  # [num_rows, num_squares] float32: sums of squares of parts of the input's rows, with SCALED
    out_ptr,  # [num_rows, size]
    size,
    num_squares,
    input_size,
    eps,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    SQUARES_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    start_next(PDL)
    wait_for_previous(PDL)
    gate = tl.load(gate_up_ptr + row * 2 * size + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * size + size + columns, mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        part = tl.arange(0, SQUARES_BLOCK)
        squares = tl.load(squares_ptr + row * num_squares + part, mask=part < num_squares, other=0.0)
        scale = tl.rsqrt(tl.sum(squares, axis=0) / input_size + eps)
        gate *= scale
        up *= scale
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * size + columns, out.to(out_ptr.dtype.element_ty), mask=mask)
