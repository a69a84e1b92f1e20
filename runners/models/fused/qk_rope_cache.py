"""From the merged projection to rotated queries and keys, and the write to the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class QkvLayout:
    """What stands in a row of the merged projection: query heads, key heads, value heads."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    #: Of the head norms; unused without them.
    eps: float

    @property
    def num_heads(self) -> int:
        """Heads of all three kinds."""
        return self.num_qo_heads + 2 * self.num_kv_heads

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.num_qo_heads // self.num_kv_heads


@dataclass(frozen=True)
class HeadInputs:
    """What turns the raw heads of one layer into attention's inputs."""

    layout: QkvLayout
    #: `[head_dim]` weights of the query and key norms, or None for a model without.
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    #: `[max_positions, head_dim]` float32: cosines of the first half of the dimensions, then sines.
    cos_sin: torch.Tensor
    #: `[num_tokens]` int64.
    positions: torch.Tensor


def split_heads(qkv: torch.Tensor, inputs: HeadInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The plain twin: `[num_tokens, heads, head_dim]` queries, keys (both normed, rotated) and values."""
    layout = inputs.layout
    heads = qkv.view(qkv.shape[0], layout.num_heads, layout.head_dim)
    sizes = [layout.num_qo_heads, layout.num_kv_heads, layout.num_kv_heads]
    q, k, v = heads.split(sizes, dim=1)
    return _rotate(q, inputs, inputs.q_norm), _rotate(k, inputs, inputs.k_norm), v


def _rotate(x: torch.Tensor, inputs: HeadInputs, norm: torch.Tensor | None) -> torch.Tensor:
    wide = x.float()
    if norm is not None:
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + inputs.layout.eps)
        wide = wide * scale * norm.float()
    cos, sin = inputs.cos_sin[inputs.positions].unsqueeze(1).chunk(2, dim=-1)
    low, high = wide.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


def rotate_into(
    qkv: torch.Tensor,
    inputs: HeadInputs,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    slots: torch.Tensor | None,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Return the queries `[num_tokens, num_qo_heads, head_dim]`; write keys and values in one kernel.

    `k_out` and `v_out` are caches (`[num_pages, page_size, num_kv_heads, head_dim]`) written at
    `slots` `[num_tokens]` int64, or without `slots` rows `[num_tokens, num_kv_heads, head_dim]`.
    """
    if qkv.is_cuda:
        return rotate_into_triton(qkv, inputs, k_out, v_out, slots, pdl)
    return rotate_into_torch(qkv, inputs, k_out, v_out, slots)


def rotate_into_torch(
    qkv: torch.Tensor,
    inputs: HeadInputs,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    slots: torch.Tensor | None,
) -> torch.Tensor:
    """The plain twin."""
    q, k, v = split_heads(qkv, inputs)
    for out, values in ((k_out, k), (v_out, v)):
        if slots is None:
            out.copy_(values)
        else:
            # index_copy_ refuses a negative index; index_put_ would wrap it round.
            out.flatten(0, 1).index_copy_(0, slots, values.to(out.dtype))
    return q.contiguous()


def rotate_into_triton(
    qkv: torch.Tensor,
    inputs: HeadInputs,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    slots: torch.Tensor | None,
    pdl: bool = False,
) -> torch.Tensor:
    """The kernel: a program a token and key head."""
    from runners.models.fused.kernels.qk_rope_cache import qk_rope_cache_kernel
    from runners.models.fused.launch import launch, launch_options

    layout, num_tokens = inputs.layout, qkv.shape[0]
    q = qkv.new_empty(num_tokens, layout.num_qo_heads, layout.head_dim)
    no_norm = inputs.q_norm is None
    launch(qk_rope_cache_kernel, (layout.num_kv_heads, num_tokens),
        qkv, qkv if no_norm else inputs.q_norm, qkv if no_norm else inputs.k_norm, inputs.cos_sin,
        inputs.positions, inputs.positions if slots is None else slots, q, k_out, v_out, layout.eps,
        NUM_KV_HEADS=layout.num_kv_heads, GROUP=layout.group, GROUP_BLOCK=1 << (layout.group - 1).bit_length(),
        HEAD_DIM=layout.head_dim, HAS_NORM=not no_norm, HAS_SLOTS=slots is not None, PDL=pdl,
        **launch_options(pdl, num_warps=1),
    )  # fmt: skip
    return q
