"""Programmatic dependent launch (PDL): a kernel starts while the one before it still runs.

With `PDL` a kernel lets the next one start at once, and waits for the one before it with
`wait_for_previous` before it touches anything that a kernel after the embedding writes. Ahead of the
wait it may read the rest: weights, and the step's inputs, as lengths and slots, and the page table.

HAZARD: every program must wait, and must not store before the wait: the waits are what orders a
buffer's next write behind its last read, over any number of kernels. And the first kernel, the embedding, is
launched without the attribute: what stands before it may be what brings the inputs, which the kernels after
it read ahead of their waits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def start_next(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    if PDL:
        gdc_wait()


@triton.jit
def prefetch_rows(
    ptr,
    first_row,
    num_rows,
    row_stride,
    begin,
    end,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Bring elements `[begin, end)` of `ROWS` 16-bit rows into the L2 cache, without waiting.

    One bulk prefetch a lane: `ROWS * PARTS` should equal the program's threads. A row's share must be
    a multiple of 16 bytes, so `PARTS` divides the span into multiples of 8 elements, the last shorter.
    """
    row = first_row + tl.arange(0, ROWS)
    span = ((end - begin + PARTS * 8 - 1) // (PARTS * 8)) * 8
    part_begin = begin + tl.arange(0, PARTS) * span
    size = tl.minimum(span, end - part_begin)
    size = tl.where((row < num_rows)[:, None], size[None, :], 0) * 2
    address = (ptr + row.to(tl.int64)[:, None] * row_stride + part_begin[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.gt.s32 p, $2, 0;
        @p cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_tokens(ptr, at, mask, SIZE: tl.constexpr):
    """Bring `SIZE` 16-bit elements from each offset `at` into the L2 cache, without waiting: one a lane."""
    address = (ptr + at).to(tl.int64)
    size = tl.where(mask, SIZE * 2, 0)
    tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.gt.s32 p, $2, 0;
        @p cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
