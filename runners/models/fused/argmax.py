"""Greedy sampling on the device."""

from __future__ import annotations

import torch

_TILE = 8192


def greedy(logits: torch.Tensor, *, out: torch.Tensor | None = None, pdl: bool = False) -> torch.Tensor:
    """`[num_rows]` int64: the first of the largest logits of each row of `[num_rows, vocab_size]`.

    Written to `out` if given. A row of NaN gives a valid id, which one is not said.
    """
    return greedy_triton(logits, out, pdl) if logits.is_cuda else greedy_torch(logits, out)


def greedy_torch(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The plain twin."""
    return torch.argmax(logits, dim=-1) if out is None else torch.argmax(logits, dim=-1, out=out)


def greedy_triton(logits: torch.Tensor, out: torch.Tensor | None = None, pdl: bool = False) -> torch.Tensor:
    """The kernels."""
    from runners.models.fused.kernels.argmax import argmax_tiles_kernel
    from runners.models.fused.launch import launch, launch_options

    num_rows, vocab_size = logits.shape
    num_tiles = -(-vocab_size // _TILE)
    best = logits.new_empty(num_rows, num_tiles, dtype=torch.float32)
    arg = logits.new_empty(num_rows, num_tiles, dtype=torch.int32)
    launch(
        argmax_tiles_kernel,
        (num_tiles, num_rows),
        logits,
        best,
        arg,
        vocab_size,
        BLOCK=_TILE,
        PDL=pdl,
        **launch_options(pdl, num_warps=8),
    )
    return greedy_from_tiles(best, arg, vocab_size, out=out, pdl=pdl)


def greedy_from_tiles(
    best: torch.Tensor,
    arg: torch.Tensor,
    vocab_size: int,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """`[num_rows]` int64 from the best value and column of each tile, `[num_rows, num_tiles]` each."""
    from runners.models.fused.kernels.argmax import argmax_rows_kernel
    from runners.models.fused.launch import launch, launch_options

    num_rows, num_tiles = best.shape
    token = best.new_empty(num_rows, dtype=torch.int64) if out is None else out
    block = min(2048, 1 << (num_tiles - 1).bit_length())
    launch(
        argmax_rows_kernel,
        (num_rows,),
        best,
        arg,
        token,
        num_tiles,
        vocab_size,
        BLOCK=block,
        PDL=pdl,
        **launch_options(pdl, num_warps=4),
    )
    return token
