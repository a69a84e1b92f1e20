"""RMSNorm, sums of squares of rows, and the embedding that starts a step."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from runners.token_feed import fed_tokens_torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, pdl: bool = False) -> torch.Tensor:
    """RMSNorm of `x` `[num_rows, size]`; without `weight` that of ones."""
    return rms_norm_triton(x, weight, eps, pdl) if x.is_cuda else rms_norm_torch(x, weight, eps)


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """The plain twin."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight.float()).to(x.dtype)


def rms_norm_triton(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, pdl: bool = False
) -> torch.Tensor:
    """The kernel."""
    from runners.models.fused.kernels.rms_norm import rms_norm_kernel
    from runners.models.fused.launch import launch, launch_options

    num_rows, size = x.shape
    out, block = torch.empty_like(x), 1 << (size - 1).bit_length()
    launch(rms_norm_kernel, (num_rows,),
        x, x if weight is None else weight, out, size, eps, HAS_WEIGHT=weight is not None, BLOCK=block,
        PDL=pdl, **launch_options(pdl, num_warps=_warps(block)),
    )  # fmt: skip
    return out


def row_squares(x: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """`[num_rows, 1]` float32: the sum of squares of each row of `x` `[num_rows, size]`."""
    if not x.is_cuda:
        return x.float().square().sum(-1, keepdim=True)
    from runners.models.fused.kernels.rms_norm import row_squares_kernel
    from runners.models.fused.launch import launch, launch_options

    num_rows, size = x.shape
    out, block = x.new_empty(num_rows, 1, dtype=torch.float32), 1 << (size - 1).bit_length()
    options = launch_options(pdl, num_warps=_warps(block))
    launch(row_squares_kernel, (num_rows,), x, out, size, BLOCK=block, PDL=pdl, **options)
    return out


def embed(
    input_ids: torch.Tensor,
    table: torch.Tensor,
    *,
    fed: tuple[torch.Tensor, torch.Tensor] | None = None,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of `table` `[vocab_size, size]` at `input_ids` `[num_rows]` int64, and their sums of squares.

    `fed` is the `token_source` and the `sampled` of `runners.token_feed`: where a source is not negative,
    the id comes from there.
    """
    if not table.is_cuda:
        x = F.embedding(input_ids if fed is None else fed_tokens_torch(input_ids, *fed), table)
        return x, row_squares(x)
    from runners.models.fused.kernels.rms_norm import embed_kernel
    from runners.models.fused.launch import launch

    num_rows, size = input_ids.shape[0], table.shape[1]
    out = table.new_empty(num_rows, size)
    squares = table.new_empty(num_rows, 1, dtype=torch.float32)
    block = 1 << (size - 1).bit_length()
    # Without the attribute, as the first kernel of a step: see `dependent_launch`.
    launch(embed_kernel, (num_rows,),
        input_ids, *(fed or (input_ids, input_ids)), table, out, squares, size, HAS_SOURCE=fed is not None, BLOCK=block, PDL=pdl, num_warps=_warps(block),
    )  # fmt: skip
    return out, squares


def _warps(block: int) -> int:
    return min(8, max(1, block // 512))
