"""The operator that stands for paged attention in a model, and its registration with transformers.

torch.compile sees one opaque operator a layer. The caches are tensor arguments and the group is the
only integer, so that layers of the same group share one compiled graph: the layer's index never
becomes a guard (with 12 layers it would hit the recompile limit of 8 and quietly run eager).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from runners.attention.base import AttentionGroup, AttentionLayer
from runners.errors import UnsupportedModelError
from runners.models.context import count_eager_layer, current_context

#: `attn_implementation` of a model whose attention runs on our backends.
#: NOTE: no mask function is registered under this name on purpose. transformers then skips building
#: masks altogether (`masking_utils._preprocess_mask_arguments`), which would read the device.
ATTENTION = "cudagraph_harness"
#: `attn_implementation` of a model that is being probed for its attention groups.
PROBE = "cudagraph_harness_probe"

_library: Any = torch.library.Library("cudagraph_harness", "DEF")
_library.define(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, int group_id)"
    " -> Tensor"
)


def _paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    group_id: int,
) -> torch.Tensor:
    context = current_context()
    layer = AttentionLayer(group_id, k_cache, v_cache)
    if context.batch.forward_mode.is_extend():
        return context.backend.forward_extend(q, k, v, layer, context.batch)
    return context.backend.forward_decode(q, k, v, layer, context.batch)


def _paged_attention_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    group_id: int,
) -> torch.Tensor:
    return q.new_empty(q.shape)


_library.impl("paged_attention", _paged_attention, "CPU")
_library.impl("paged_attention", _paged_attention, "CUDA")
torch.library.register_fake("cudagraph_harness::paged_attention", _paged_attention_fake)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: `[1, heads, num_tokens, head_dim]` in, tokens first out.

    Scale, window and cap were read from the same keywords by the probe and live in the group.
    """
    if not torch.compiler.is_compiling():
        count_eager_layer()
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    out = torch.ops.cudagraph_harness.paged_attention(
        q, k, v, module.k_cache, module.v_cache, module.group_id
    )
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION, _attend)

# --- probing -----------------------------------------------------------------------------------

_probed: list[tuple[nn.Module, AttentionGroup]] = []


def _probe(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function that notes what it is asked for and returns zeros."""
    if value.shape != key.shape:
        raise UnsupportedModelError("keys and values have unlike shapes, which the paged cache cannot hold.")
    group = AttentionGroup(
        num_qo_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[-1],
        sm_scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window=sliding_window,
        logits_soft_cap=softcap,
    )
    _probed.append((module, group))
    return torch.zeros_like(query).transpose(1, 2), None


AttentionInterface.register(PROBE, _probe)


def route_attention(model: Any, max_seq_len: int) -> tuple[list[nn.Module], list[AttentionGroup]]:
    """Send the model's attention to our operator; return its attention modules and their groups.

    The groups are read off one call of the model with one token: they are what transformers itself
    passes for this family, layer by layer. A window that no request can outgrow counts as none.
    """
    _probed.clear()
    model.set_attn_implementation(PROBE)
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    model(input_ids=token, position_ids=token, use_cache=False)
    model.set_attn_implementation(ATTENTION)
    modules = [module for module, _ in _probed]
    groups = [_without_idle_window(group, max_seq_len) for _, group in _probed]
    _probed.clear()
    return modules, groups


def _without_idle_window(group: AttentionGroup, max_seq_len: int) -> AttentionGroup:
    if group.sliding_window is not None and group.sliding_window >= max_seq_len:
        return replace(group, sliding_window=None)
    return group
