"""Linear layers of a bfloat16 model on a CPU, with weights in the layout that oneDNN computes in.

`F.linear` brings a plain weight into that layout again in every call, which costs more than the product
of a decode step: 2.2 times as much at 8 rows of SmolLM2 on a Zen 4 core. Packed once, a step only reads it.
The result is the same to the bit.

The only file that touches torch's private oneDNN operators, which Inductor's own weight packing calls.
"""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

#: Rows that a weight is packed for. The layout serves any number; it was fastest for 1 to 64.
_NUM_ROWS = 16

_handles = itertools.count()
_modules: WeakValueDictionary[int, PackedLinear] = WeakValueDictionary()


class PackedLinear(nn.Module):
    """Takes the place of `linear`, whose weight it packs and does not keep.

    `state_dict` has the weight as `nn.Linear` has it.
    """

    handle: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_parameter("bias", linear.bias)
        # Not a buffer: it has no storage, which whoever walks the buffers asks for.
        self.packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _NUM_ROWS)
        # For the compiled layer, which cannot take a packed tensor. A tensor, not an integer: layers that
        # share one compiled graph would guard on an integer.
        handle = next(_handles)
        self.register_buffer("handle", torch.tensor(handle), persistent=False)
        _modules[handle] = self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` in, `[..., out_features]` out."""
        if torch.compiler.is_compiling():
            out: torch.Tensor = torch.ops.cudagraph_harness.packed_linear(x, self.handle, self.out_features)
            return out
        return self.multiply(x)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`forward`, outside compiled code."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.packed.to_dense()


_library: Any = torch.library.Library("cudagraph_harness", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor handle, int out_features) -> Tensor")


def _packed_linear(x: torch.Tensor, handle: torch.Tensor, out_features: int) -> torch.Tensor:
    return _modules[int(handle)].multiply(x)


def _packed_linear_fake(x: torch.Tensor, handle: torch.Tensor, out_features: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


_library.impl("packed_linear", _packed_linear, "CPU")
torch.library.register_fake("cudagraph_harness::packed_linear", _packed_linear_fake)


def can_pack() -> bool:
    """Return True if this torch and this CPU multiply packed bfloat16 weights."""
    mkldnn: Any = torch.ops.mkldnn
    return (
        torch.backends.mkldnn.is_available()
        and all(hasattr(mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
        and bool(mkldnn._is_mkldnn_bf16_supported())
    )


def pack_linears(model: nn.Module) -> int:
    """Pack the bfloat16 linear layers of `model`, on a CPU; return the bytes that this adds.

    A weight that another module holds too (a tied embedding) stays there, and its packed copy counts.
    """
    if not can_pack():
        return 0
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16 and child.weight.is_cpu
    ]
    for parent, name, linear in found:
        setattr(parent, name, PackedLinear(linear))
    kept = {id(parameter) for parameter in model.parameters()}
    return sum(linear.weight.nbytes for _, _, linear in found if id(linear.weight) in kept)
