"""Decode attention by our own kernel, which needs no plan; prefill by another backend.

The kernel reads lengths, page table and slots on the device and its grid depends on the batch size
alone, so that a captured graph is ready as soon as its inputs are copied: host prepare has no plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from runners.attention.base import AttentionBackend, AttentionGroup, AttentionLayer
from runners.attention.fragment_attention import FragmentAttentionTile, attend_fragments
from runners.attention.fragment_attention import unusable_reason as fragments_unusable_reason
from runners.attention.host_pages import HostLens
from runners.errors import PlanLayoutError
from runners.forward_batch import ForwardBatch, ForwardMode
from runners.models.fused.qk_rope_cache import HeadInputs
from runners.paged_kv import PagedKV

#: Programs that keep every multiprocessor of a large GPU busy; fewer heads are split until there are as many.
_TARGET_PROGRAMS = 256
_MAX_SPLITS = 16
_IN_FLIGHT_BYTES = 96 << 10


@dataclass(frozen=True)
class AttentionTile:
    """How the kernel cuts a batch up.

    With `heads` (a power of two): the striped kernel, a program for `heads` key heads of each of `splits`
    spans of a request; a turn takes `block` tokens a stripe, and there are `num_warps` stripes.
    Without: the blocked kernel, `splits` programs a request and key head, `block` tokens a turn.
    """

    #: A power of two.
    splits: int
    block: int = 64
    num_warps: int = 4
    stages: int = 3
    #: Tokens behind the first block that are brought to the L2 cache while the kernel before runs.
    prefetch: int = 0
    heads: int = 0
    #: A span of the striped kernel has at least so many tokens: less is not worth a merge.
    min_span: int = 64
    #: Registers a thread may have, so that more programs share a multiprocessor; 0: as many as it likes.
    registers: int = 0

    def __str__(self) -> str:
        name = f"s{self.splits}b{self.block}w{self.num_warps}x{self.stages}"
        if self.heads:
            return f"h{self.heads}{name}m{self.min_span}" + (f"r{self.registers}" if self.registers else "")
        return f"{name}p{self.prefetch}" if self.prefetch else name


def tile_of(values: Mapping[str, Any]) -> AttentionTile | FragmentAttentionTile:
    """The tile of a table's entry."""
    return FragmentAttentionTile(**values) if "warps" in values else AttentionTile(**values)


def default_tile(batch_size: int, num_kv_heads: int, row_bytes: int = 256) -> AttentionTile:
    """The tile for a batch when nothing was measured; `row_bytes` is the size of one key in the cache.

    After what won on an H200: spans until a large GPU is busy, narrow programs where they are many; several
    heads a program once the batch alone makes enough of them. Loads in flight are kept to 96 KiB.
    """
    splits = 1
    while splits < _MAX_SPLITS and batch_size * num_kv_heads * splits * 2 <= _TARGET_PROGRAMS:
        splits *= 2
    heads = 4 if batch_size * num_kv_heads > 2 * _TARGET_PROGRAMS else 1
    num_warps = 2 if splits > 4 or row_bytes > 512 else 4
    turn_bytes = 2 * 16 * num_warps * row_bytes
    stages = 1 + min(3, max(1, _IN_FLIGHT_BYTES // turn_bytes))
    min_span = 32 if splits == _MAX_SPLITS else 128
    return AttentionTile(splits, 16, num_warps, stages, heads=heads, min_span=min_span)


def unusable_reason(groups: Sequence[AttentionGroup]) -> str | None:
    """Say why the kernel cannot serve a model, or None if it can."""
    for group in groups:
        if group.head_dim not in (16, 32, 64, 128, 256):
            return f"head_dim={group.head_dim} is not a power of two from 16 to 256"
    return None


class TritonAttentionBackend(AttentionBackend):
    """Plans nothing for decode. `prefill` plans and computes prefill steps, over the same cache.

    A head size that is not a power of two from 16 to 256 is refused with ValueError.
    """

    name = "triton"
    masks_tail = True
    replay_plans_from = "nothing"

    def __init__(
        self,
        groups: Sequence[AttentionGroup],
        kv: PagedKV,
        prefill: AttentionBackend,
        *,
        max_batch_size: int,
        max_seq_len: int,
        device: torch.device,
    ) -> None:
        reason = unusable_reason(groups)
        if reason is not None:
            raise ValueError(f"attention.backend=triton: {reason}. Use attention.backend=flashinfer.")
        self.groups = list(groups)
        self.kv = kv
        self.prefill = prefill
        self.max_seq_len = max_seq_len
        self.device = device
        self.pdl = False
        #: True where every decode step is fused: the new key and value come from registers.
        self.looks_up_past_only = False
        #: Batch size → measured tile; `default_tile` where there is none.
        self.tiles: dict[int, AttentionTile | FragmentAttentionTile] = {}
        #: Why no step runs by a `FragmentAttentionTile`; None if they can.
        self.no_fragments = fragments_unusable_reason(groups, kv.k_cache[0], device)
        self._static_lens = HostLens()
        self._longest = np.array(max_seq_len, dtype=np.int32)
        self._max_kv_heads = max(group.num_kv_heads for group in groups)
        self._make_counters(max_batch_size)

    def _make_counters(self, max_bs: int) -> None:
        # Zero between launches: the kernel that counts up to the splits sets them back.
        self._counters = torch.zeros(max_bs * self._max_kv_heads, dtype=torch.int32, device=self.device)
        self.captured_parts = (self._counters,)

    # --- planning ------------------------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if max_bs * self._max_kv_heads > len(self._counters):
            self._make_counters(max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if forward_batch.forward_mode.is_extend():
            self.prefill.init_forward_metadata(forward_batch)

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        forward_mode: ForwardMode,
    ) -> None:
        """Nothing to plan: the kernel reads the static buffers of the batch."""

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_sum: int,
        forward_mode: ForwardMode,
        seq_lens_cpu: torch.Tensor,
    ) -> None:
        """Only checks that no request is longer than the page table is wide."""
        lens = self._static_lens.array(seq_lens_cpu)
        # With cold caches to find the longest takes twice as long.
        if 1 in np.greater(lens, self._longest).tobytes():
            raise PlanLayoutError(
                f"a request has {lens.max()} tokens, but the page table was made for max_seq_len="
                f"{self.max_seq_len}: raise model.max_seq_len."
            )

    # --- computing -----------------------------------------------------------------------------

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        return self.prefill.forward_extend(q, k, v, layer, forward_batch)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        slots = forward_batch.out_cache_loc
        layer.k_cache.flatten(0, 1).index_copy_(0, slots, k.to(layer.k_cache.dtype))
        layer.v_cache.flatten(0, 1).index_copy_(0, slots, v.to(layer.v_cache.dtype))
        return self.attend_decode(q.contiguous(), layer, forward_batch)

    def attend_decode(self, q: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        """Attend with `q` `[bs, num_qo_heads, head_dim]`; keys and values are in the cache already."""
        return self._launch(q, None, layer, batch)

    def attend_fused(
        self, qkv: torch.Tensor, inputs: HeadInputs, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        """Norm, rotate, write to the cache and attend in one kernel, from the raw merged projection.

        `qkv` is `[bs, (num_qo_heads + 2 * num_kv_heads) * head_dim]`; returns
        `[bs, num_qo_heads, head_dim]`.
        """
        tile = self.tile(qkv.shape[0])
        is_alike = qkv.dtype == layer.k_cache.dtype
        if isinstance(tile, FragmentAttentionTile) and self.no_fragments is None and is_alike:
            group, table = self.groups[layer.group_id], self.kv.page_table
            return attend_fragments(qkv, inputs, group, layer, batch, table, tile, pdl=self.pdl)
        return self._launch(qkv, inputs, layer, batch)

    def tile(self, batch_size: int) -> AttentionTile | FragmentAttentionTile:
        """The tile for a batch: the one set for it, or the rule of thumb.

        A captured graph keeps it for requests of every length.
        """
        return self.tiles.get(batch_size) or self._default_tile(batch_size)

    def _default_tile(self, batch_size: int) -> AttentionTile:
        row_bytes = max(group.head_dim for group in self.groups) * self.kv.dtype.itemsize
        return default_tile(batch_size, self._max_kv_heads, row_bytes)

    def _launch(
        self, q: torch.Tensor, inputs: HeadInputs | None, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        from runners.models.fused.kernels.decode_attention import decode_attention_kernel
        from runners.models.fused.kernels.striped_attention import striped_attention_kernel
        from runners.models.fused.launch import launch, launch_options

        group, bs = self.groups[layer.group_id], q.shape[0]
        heads = group.num_kv_heads
        tile = self.tile(bs)
        if isinstance(tile, FragmentAttentionTile):  # not of these heads: the others are served all the same
            tile = self._default_tile(bs)
        share = group.num_qo_heads // heads
        power = 1 << (share - 1).bit_length()
        out = q.new_empty(bs, group.num_qo_heads, group.head_dim)
        # With one split nothing is partial, and the kernel does not look at these.
        parts = bs * heads * tile.splits if tile.splits > 1 else 1
        part = q.new_empty(parts * share * group.head_dim, dtype=torch.float32)
        stat = q.new_empty(parts * 2 * share, dtype=torch.float32)
        norms = (q, q) if inputs is None or inputs.q_norm is None else (inputs.q_norm, inputs.k_norm)
        table = self.kv.page_table
        limit = {"maxnreg": tile.registers} if tile.registers else {}
        if tile.heads:
            # The largest power of two up to the tile's that divides the heads.
            together = math.gcd(tile.heads, heads)
            kernel, grid = striped_attention_kernel, (heads // together, tile.splits, bs)
            options = {
                "GROUP_BLOCK": max(8, power), "HEADS": together, "WAYS": max(1, tile.num_warps // together),
                "MIN_SPAN": tile.min_span,
            }  # fmt: skip
        else:
            kernel, grid = decode_attention_kernel, (heads, tile.splits, bs)
            prefetch = tile.prefetch if layer.k_cache.element_size() == 2 else -1
            options = {"GROUP_BLOCK": max(16, power), "PREFETCH": prefetch}
        launch(kernel, grid,
            q, *norms, q if inputs is None else inputs.cos_sin, layer.k_cache, layer.v_cache, table,
            batch.req_pool_indices, batch.seq_lens, batch.out_cache_loc, out, part, stat, self._counters,
            table.stride(0), group.sm_scale, 0.0 if inputs is None else inputs.layout.eps,
            NUM_KV_HEADS=heads, GROUP=share, GROUP_POWER=power, HEAD_DIM=group.head_dim,
            PAGE_SIZE=self.kv.page_size, WINDOW=group.sliding_window or 0,
            SOFT_CAP=group.logits_soft_cap or 0.0, FUSED=inputs is not None, HAS_NORM=norms[0] is not q,
            SPLITS=tile.splits, BLOCK=tile.block, STAGES=tile.stages, PDL=self.pdl, **options,
            **launch_options(self.pdl, num_warps=tile.num_warps, **limit),
        )  # fmt: skip
        return out

    def settle(self) -> None:
        self.prefill.settle()

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "prefill": self.prefill.describe(), "dependent_launch": self.pdl}

    def captured_tensors(self) -> dict[str, torch.Tensor]:
        return {"attention.counters": self._counters}
