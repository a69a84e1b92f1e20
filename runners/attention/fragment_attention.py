"""Decode attention in warps that stream keys and values for the tensor cores; compiled by NVRTC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from runners.attention.base import AttentionGroup, AttentionLayer
from runners.forward_batch import ForwardBatch
from runners.models.fused import nvrtc
from runners.models.fused.qk_rope_cache import HeadInputs

_SOURCE = Path(__file__).parents[1] / "models" / "fused" / "kernels" / "fragment_attention.cu"
_HEAD_DIM, _MAX_GROUP, _WARP_TOKENS = 128, 4, 16
#: Bytes of 16 keys and 16 values in shared memory, rows of 256 and 272, and of the barrier that tells of them.
_WARP_BYTES = 16 * (256 + 272) + 8
#: Devices from here on have clusters, bulk copies and dependent launch.
_FIRST = (9, 0)


@dataclass(frozen=True)
class FragmentAttentionTile:
    """How the kernel cuts a batch up: a CTA a key head, request and span; a turn takes 16 tokens a warp."""

    #: Spans of a request's past, one a CTA of a cluster: 1, 2, 4 or 8.
    splits: int
    warps: int = 4
    #: Turns whose keys and values are on their way.
    stages: int = 3
    #: CTAs for which the registers of a multiprocessor must suffice.
    min_ctas: int = 2

    def __str__(self) -> str:
        return f"frag s{self.splits}w{self.warps}x{self.stages}o{self.min_ctas}"

    def shared_bytes(self, group: int) -> int:
        """Shared memory of a CTA whose key head serves `group` query heads."""
        sums = (self.warps + self.splits) * group * (_HEAD_DIM + 2)
        return self.stages * self.warps * _WARP_BYTES + 4 * sums

    def refusal(self, groups: Sequence[AttentionGroup], device: torch.device) -> str | None:
        """Why this tile cannot serve these groups on `device`, where the kernel runs; None if it can."""
        # Without a stage there is no slot to copy to: the kernel would compute garbage.
        fits = self.splits in (1, 2, 4, 8) and self.warps <= nvrtc.MAX_WARPS
        if not fits or min(self.warps, self.stages, self.min_ctas) < 1:
            return f"its splits are 1, 2, 4 or 8, its warps at most {nvrtc.MAX_WARPS}, and all of its numbers at least 1"
        share = max(group.num_qo_heads // group.num_kv_heads for group in groups)
        return nvrtc.lacks_shared_memory(device, self.shared_bytes(share))


def unusable_reason(
    groups: Sequence[AttentionGroup], cache: torch.Tensor, device: torch.device
) -> str | None:
    """Say why the kernel cannot serve a model on `device`, or None if it can.

    `cache` is one layer's, `[num_pages, page_size, num_kv_heads, head_dim]`.
    """
    if reason := nvrtc.unusable_reason(device, _FIRST):
        return reason
    if cache.dtype not in nvrtc.ELEMENTS or cache.shape[1] % _WARP_TOKENS:
        return "it takes a cache of bfloat16 or float16 in pages of 16 tokens or a multiple"
    for group in groups:
        if group.head_dim != _HEAD_DIM or group.num_qo_heads > _MAX_GROUP * group.num_kv_heads:
            return "it takes heads of 128 and at most 4 query heads a key head"
        if group.sliding_window or group.logits_soft_cap:
            return "it knows no sliding window and no soft cap"
    return None


def attend_fragments(
    qkv: torch.Tensor,
    inputs: HeadInputs,
    group: AttentionGroup,
    layer: AttentionLayer,
    batch: ForwardBatch,
    page_table: torch.Tensor,
    tile: FragmentAttentionTile,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Norm, rotate, write to the cache and attend, as `TritonAttentionBackend.attend_fused`."""
    heads, share, bs = group.num_kv_heads, group.num_qo_heads // group.num_kv_heads, qkv.shape[0]
    out = qkv.new_empty(bs, group.num_qo_heads, group.head_dim)
    has_norm = inputs.q_norm is not None and inputs.k_norm is not None
    defines = {
        "ELEMENT": nvrtc.ELEMENTS[qkv.dtype], "KV_HEADS": heads, "GROUP": share, "PAGE_SIZE": layer.k_cache.shape[1],
        "WARPS": tile.warps, "STAGES": tile.stages, "SPLITS": tile.splits, "MIN_CTAS": tile.min_ctas,
        "HAS_NORM": int(has_norm), "PDL": int(pdl),
    }  # fmt: skip
    nvrtc.launch_cuda(
        _SOURCE, "fragment_attention", defines,
        (qkv, qkv if inputs.q_norm is None else inputs.q_norm, qkv if inputs.k_norm is None else inputs.k_norm,
         inputs.cos_sin, layer.k_cache, layer.v_cache, page_table, batch.req_pool_indices, batch.seq_lens,
         batch.out_cache_loc, out, page_table.stride(0), group.sm_scale, inputs.layout.eps),
        grid=bs * heads * tile.splits, threads=32 * tile.warps, shared_bytes=tile.shared_bytes(share),
        cluster=tile.splits, pdl=pdl, device=qkv.device,
    )  # fmt: skip
    return out
