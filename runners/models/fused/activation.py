"""SiLU of the gate times the up projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

_BLOCK = 1024


@dataclass(frozen=True)
class RowScale:
    """The norm of a product's input that was left out: its output is to be scaled, row by row."""

    #: `[num_rows, parts]` float32: sums of squares of parts of each row of the input.
    squares: torch.Tensor
    #: Numbers in a row of the input.
    size: int
    eps: float


def silu_and_mul(gate_up: torch.Tensor, scale: RowScale | None = None, *, pdl: bool = False) -> torch.Tensor:
    """`[num_rows, 2 * size]` (gate, then up) in, `silu(gate) * up` `[num_rows, size]` out, of both scaled."""
    if gate_up.is_cuda:
        return silu_and_mul_triton(gate_up, scale, pdl)
    return silu_and_mul_torch(gate_up, scale)


def silu_and_mul_torch(gate_up: torch.Tensor, scale: RowScale | None = None) -> torch.Tensor:
    """The plain twin."""
    wide = gate_up.float()
    if scale is not None:
        wide = wide * torch.rsqrt(scale.squares.sum(-1, keepdim=True) / scale.size + scale.eps)
    gate, up = wide.chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def silu_and_mul_triton(
    gate_up: torch.Tensor, scale: RowScale | None = None, pdl: bool = False
) -> torch.Tensor:
    """The kernel."""
    from runners.models.fused.kernels.activation import silu_and_mul_kernel
    from runners.models.fused.launch import launch, launch_options

    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, size)
    squares = gate_up if scale is None else scale.squares
    num_squares = 1 if scale is None else squares.shape[1]
    launch(
        silu_and_mul_kernel, (-(-size // _BLOCK), num_rows),
        gate_up, squares, out, size, num_squares, 1 if scale is None else scale.size,
        0.0 if scale is None else scale.eps, SCALED=scale is not None, BLOCK=_BLOCK,
        SQUARES_BLOCK=squares_block(num_squares), PDL=pdl, **launch_options(pdl, num_warps=4),
    )  # fmt: skip
    return out


def squares_block(num_squares: int) -> int:
    """The block in which a kernel reads a row's sums of squares: few widths, so that few kernels are compiled."""
    return next(width for width in (64, 256, 1024, 4096) if width >= num_squares)
