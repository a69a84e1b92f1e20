"""Greedy sampling: the first of the largest logits of each row, in two kernels.

The first finds the best of each tile of the vocabulary (the LM head's GEMM does it in its epilogue),
the second the best tile. A row of NaN gives a valid id, so that poisoned padding stays in bounds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runners.models.fused.kernels.dependent_launch import start_next, wait_for_previous


@triton.jit
def argmax_tiles_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    max_ptr,  # [num_rows, num_tiles] float32 out
    arg_ptr,  # [num_rows, num_tiles] int32 out
    vocab_size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, row = tl.program_id(0), tl.program_id(1)
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    start_next(PDL)
    wait_for_previous(PDL)
    at = row.to(tl.int64) * vocab_size + columns
    logits = tl.load(logits_ptr + at, mask=columns < vocab_size, other=float("-inf")).to(tl.float32)
    best = tl.max(logits, axis=0)
    first = tl.min(tl.where(logits == best, columns, vocab_size - 1), axis=0)
    tl.store(max_ptr + row * tl.num_programs(0) + tile, best)
    tl.store(arg_ptr + row * tl.num_programs(0) + tile, first)


@triton.jit(do_not_specialize=["num_tiles"])
def argmax_rows_kernel(
    max_ptr,  # [num_rows, num_tiles] float32
    arg_ptr,  # [num_rows, num_tiles] int32
    out_ptr,  # [num_rows] int64 out
    num_tiles,
    vocab_size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    start_next(PDL)
    wait_for_previous(PDL)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    first = tl.full([BLOCK], 0, tl.int32) + vocab_size - 1
    for begin in range(0, num_tiles, BLOCK):
        tiles = begin + tl.arange(0, BLOCK)
        mask = tiles < num_tiles
        value = tl.load(max_ptr + row * num_tiles + tiles, mask=mask, other=float("-inf"))
        arg = tl.load(arg_ptr + row * num_tiles + tiles, mask=mask, other=0)
        # Later tiles hold larger ids, so an equal value never replaces an earlier one.
        better = value > best
        first = tl.where(better, arg, first)
        best = tl.where(better, value, best)
    top = tl.max(best, axis=0)
    token = tl.min(tl.where(best == top, first, vocab_size - 1), axis=0)
    tl.store(out_ptr + row, token.to(tl.int64))
