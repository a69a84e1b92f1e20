"""Rewrites a loaded transformers decoder as a `FusedDecoder`, layer by layer.

A merged projection is a new tensor: its parts are copied and freed before the next layer is touched,
so that never more than one layer's weights exist twice. Every other weight keeps its storage.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from runners.attention.base import AttentionGroup
from runners.models.fused.layers import FusedAttention, FusedDecoder, FusedLayer
from runners.models.fused.qk_rope_cache import QkvLayout
from runners.models.fused.skinny_gemm import Product


@torch.no_grad()
def rewrite(model: Any, groups: list[AttentionGroup], max_seq_len: int) -> FusedDecoder:
    """Return `model` (a transformers causal language model of `FUSED_FAMILIES`) in fused form.

    `model` is used up: its layers are empty afterwards.

    Args:
        groups: the attention group of each layer.
        max_seq_len: positions of the rotary table.
    """
    decoder = model.model
    cos_sin = _rotary_table(decoder.rotary_emb, max_seq_len, model.device)
    embedding: torch.Tensor = decoder.embed_tokens.weight
    layers = []
    for index, group in enumerate(groups):
        layers.append(_layer(decoder.layers[index], group))
        decoder.layers[index] = nn.Identity()
    head = _head(model.lm_head, decoder.norm, embedding)
    fused = FusedDecoder(embedding.data, layers, head, cos_sin)
    fused.requires_grad_(False)
    return fused.eval()


def _rotary_table(rotary: Any, max_seq_len: int, device: torch.device) -> torch.Tensor:
    """`[max_seq_len, head_dim]` float32: cosines of the first half of the dimensions, then sines.

    Read off transformers' own module, so that every scaling it knows is in it.
    """
    positions = torch.arange(max_seq_len, device=device).unsqueeze(0)
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32, device=device), positions)
    half = cos.shape[-1] // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1).float().contiguous()


def _layer(layer: Any, group: AttentionGroup) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    norm, ffn_norm = layer.input_layernorm, layer.post_attention_layernorm
    has_head_norms = hasattr(attention, "q_norm")
    eps = attention.q_norm.variance_epsilon if has_head_norms else norm.variance_epsilon
    layout = QkvLayout(group.num_qo_heads, group.num_kv_heads, group.head_dim, eps)
    bias = _merge_biases([attention.q_proj, attention.k_proj, attention.v_proj])
    qkv = Product(
        _merge([attention.q_proj, attention.k_proj, attention.v_proj], norm.weight),
        bias, scaled=True, eps=norm.variance_epsilon,
    )  # fmt: skip
    fused = FusedAttention(
        layout,
        qkv,
        _residual(attention.o_proj),
        attention.q_norm.weight.data if has_head_norms else None,
        attention.k_norm.weight.data if has_head_norms else None,
    )
    gate_up = Product(
        _merge([mlp.gate_proj, mlp.up_proj], ffn_norm.weight),
        scaled=True, eps=ffn_norm.variance_epsilon, silu=True,
    )  # fmt: skip
    return FusedLayer(fused, gate_up, _residual(mlp.down_proj))


def _merge(parts: list[nn.Linear], norm: torch.Tensor) -> torch.Tensor:
    """The rows of `parts` one after another, times the norm's weight; the parts are empty afterwards."""
    weight = torch.empty(
        sum(part.out_features for part in parts),
        parts[0].in_features,
        dtype=parts[0].weight.dtype,
        device=parts[0].weight.device,
    )
    first = 0
    for part in parts:
        weight[first : first + part.out_features].copy_(part.weight)
        first += part.out_features
        part.weight = nn.Parameter(part.weight.new_empty(0), requires_grad=False)
    return _fold(weight, norm)


def _fold(weight: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Multiply the columns of `weight` by `norm` in place, rounded once."""
    if bool((norm == 1).all()):
        return weight
    return weight.copy_(weight.float().mul_(norm.float()))


def _merge_biases(parts: list[nn.Linear]) -> torch.Tensor | None:
    if parts[0].bias is None:
        return None
    return torch.cat([part.bias for part in parts])


def _residual(linear: nn.Linear) -> Product:
    return Product(linear.weight.data, None if linear.bias is None else linear.bias.data, residual=True)


def _head(head: nn.Linear, norm: Any, embedding: torch.Tensor) -> Product:
    weight, eps = head.weight.data, norm.variance_epsilon
    if head.weight is embedding:
        # The table is read by the embedding too, so the norm's weight stays apart.
        return Product(weight, scaled=True, norm=norm.weight.data, eps=eps, argmax=True)
    return Product(_fold(weight, norm.weight), scaled=True, eps=eps, argmax=True)
