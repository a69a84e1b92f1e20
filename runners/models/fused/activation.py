"""SiLU of the gate times the up projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F

_BLOCK = 1024


def silu_and_mul(gate_up: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """`[num_rows, 2 * size]` (gate, then up) in, `silu(gate) * up` `[num_rows, size]` out."""
    return silu_and_mul_triton(gate_up, pdl) if gate_up.is_cuda else silu_and_mul_torch(gate_up)


def silu_and_mul_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """The plain twin."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def silu_and_mul_triton(gate_up: torch.Tensor, pdl: bool = False) -> torch.Tensor:
    """The kernel."""
    from runners.models.fused.kernels.activation import silu_and_mul_kernel
    from runners.models.fused.launch import launch, launch_options

    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, size)
    launch(
        silu_and_mul_kernel,
        (-(-size // _BLOCK), num_rows),
        gate_up,
        out,
        size,
        BLOCK=_BLOCK,
        PDL=pdl,
        **launch_options(pdl, num_warps=4),
    )
    return out
