"""Paged attention in plain torch: the reference backend, and the one for machines without CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from runners.attention.base import AttentionBackend, AttentionGroup, AttentionLayer
from runners.errors import PlanLayoutError
from runners.forward_batch import ForwardBatch, ForwardMode
from runners.paged_kv import NULL_PAGE, PagedKV

#: Rows of queries whose scores are made at a time where no fused kernel makes them: 1 MiB a head and 1,024 tokens.
_PLAIN_ROWS = 256


@dataclass
class _DecodePlan:
    """What the decode step of one group gathers."""

    #: `[batch_size, num_columns]` int64. A masked column reads slot 0, in the null page.
    slots: torch.Tensor
    #: `[batch_size, 1, 1, num_columns]` in the cache's dtype: added to the scores, 0 or -inf. A bool
    #: mask would be turned into this one in every layer.
    bias: torch.Tensor


@dataclass
class _ExtendSpan:
    """One request of a prefill step."""

    q_start: int
    q_end: int
    kv_start: int
    kv_end: int
    #: `[new tokens, gathered tokens]` as in `_DecodePlan`; None where causal masking says the same.
    bias: torch.Tensor | None


@dataclass
class _ExtendPlan:
    """What the prefill step of one group gathers: the visible tokens of all requests, packed."""

    #: `[total gathered tokens]` int64.
    slots: torch.Tensor
    spans: list[_ExtendSpan]


class TorchAttentionBackend(AttentionBackend):
    """Gathers each request's tokens from the pages, then calls scaled dot-product attention.

    A masked column is never read from a live page: its slot is replaced by slot 0 of the null page,
    which is finite. Zeroing scores alone would not do, because 0 * NaN is NaN.

    A step plans as many columns as its longest request has tokens, at most the sliding window. In
    CUDA graphs the shape cannot change, so there the plan is as wide as the table.
    """

    name = "torch"
    masks_tail = True

    def __init__(
        self,
        groups: Sequence[AttentionGroup],
        kv: PagedKV,
        *,
        max_batch_size: int,
        max_seq_len: int,
        device: torch.device,
    ) -> None:
        self.groups = list(groups)
        self.kv = kv
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self.device = device
        self._token_index = torch.arange(max_seq_len, device=device)
        self._max_columns = [min(group.sliding_window or max_seq_len, max_seq_len) for group in groups]
        self._static_slots: list[torch.Tensor] = []
        self._static_bias: list[torch.Tensor] = []
        self._decode_plans: list[_DecodePlan] = []
        self._extend_plans: list[_ExtendPlan] = []

    # --- planning ------------------------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        def flat(columns: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(max_bs * columns, dtype=dtype, device=self.device)

        self._static_slots = [flat(columns, torch.int64) for columns in self._max_columns]
        self._static_bias = [flat(columns, self.kv.dtype) for columns in self._max_columns]
        self.captured_parts = (*self._static_slots, *self._static_bias)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        # A row of length 0 would be masked altogether, and its softmax NaN.
        return 1

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if forward_batch.forward_mode.is_extend():
            self._extend_plans = [self._plan_extend(group, forward_batch) for group in self.groups]
            return
        rows = self._gather_rows(forward_batch.req_pool_indices)
        longest = _longest(forward_batch.seq_lens_cpu)
        self._decode_plans = [
            self._plan_decode(rows, forward_batch.seq_lens, min(longest, columns))
            for columns in self._max_columns
        ]

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        forward_mode: ForwardMode,
    ) -> None:
        self._plan_static(bs, req_pool_indices, seq_lens, longest=1)

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_sum: int,
        forward_mode: ForwardMode,
        seq_lens_cpu: torch.Tensor,
    ) -> None:
        longest = _longest(seq_lens_cpu[:bs])
        if longest > self.max_seq_len:
            raise PlanLayoutError(
                f"a request has {longest} tokens, but the graphs were captured for at most "
                f"max_seq_len={self.max_seq_len}: raise model.max_seq_len."
            )
        self._plan_static(bs, req_pool_indices, seq_lens, longest)

    def _plan_static(
        self, bs: int, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, longest: int
    ) -> None:
        """Plan into the static buffers, so that a captured graph finds the plan where it was."""
        rows = self._gather_rows(req_pool_indices[:bs])
        plans = []
        for group_id, max_columns in enumerate(self._max_columns):
            # A CUDA graph has fixed shapes. An emulated one runs the code again, and may be narrower.
            columns = max_columns if self.device.type == "cuda" else min(longest, max_columns)
            plan = self._plan_decode(rows, seq_lens[:bs], columns)
            slots = self._static_slots[group_id][: bs * columns].view(bs, columns)
            bias = self._static_bias[group_id][: bs * columns].view(bs, 1, 1, columns)
            plans.append(_DecodePlan(slots.copy_(plan.slots), bias.copy_(plan.bias)))
        self._decode_plans = plans

    def _gather_rows(self, req_pool_indices: torch.Tensor) -> torch.Tensor:
        """`[batch_size, max_pages]` int32: the pages of each request of the step."""
        return self.kv.page_table.index_select(0, req_pool_indices)

    def _plan_decode(self, rows: torch.Tensor, seq_lens: torch.Tensor, columns: int) -> _DecodePlan:
        """Plan the last `columns` tokens of each request (all of them where it is shorter)."""
        lens = seq_lens.unsqueeze(1).long()
        positions = (lens - columns).clamp_(min=0) + self._token_index[:columns]
        is_hidden = positions >= lens
        slots = _slots_of(rows, positions, self.kv.page_size)
        slots.masked_fill_(is_hidden, NULL_PAGE * self.kv.page_size)
        return _DecodePlan(slots, self._bias(is_hidden)[:, None, None, :])

    def _bias(self, is_hidden: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(is_hidden.shape, dtype=self.kv.dtype, device=self.device)
        return zeros.masked_fill_(is_hidden, float("-inf"))

    def _plan_extend(self, group: AttentionGroup, batch: ForwardBatch) -> _ExtendPlan:
        assert batch.extend_seq_lens_cpu is not None, "a prefill step says how many tokens are new"
        window = group.sliding_window or self.max_seq_len
        spans: list[_ExtendSpan] = []
        positions: list[np.ndarray] = []
        q_start = kv_start = 0
        for total, new in zip(batch.seq_lens_cpu.tolist(), batch.extend_seq_lens_cpu, strict=True):
            cached = total - new
            first = max(0, cached - window + 1)  # the oldest token that the first new one sees
            positions.append(np.arange(first, total, dtype=np.int64))
            kv_end = kv_start + total - first
            bias = self._extend_bias(cached - first, new, window)
            spans.append(_ExtendSpan(q_start, q_start + new, kv_start, kv_end, bias))
            q_start, kv_start = q_start + new, kv_end
        return _ExtendPlan(self._extend_slots(batch, positions), spans)

    def _extend_slots(self, batch: ForwardBatch, positions: list[np.ndarray]) -> torch.Tensor:
        owner = np.repeat(np.arange(len(positions)), [len(p) for p in positions])
        owners = torch.from_numpy(owner).to(self.device, non_blocking=True)
        packed = torch.from_numpy(np.concatenate(positions)).to(self.device, non_blocking=True)
        rows = batch.req_pool_indices[owners].long()
        pages = self.kv.page_table[rows, packed // self.kv.page_size].long()
        return pages * self.kv.page_size + packed % self.kv.page_size

    def _extend_bias(self, cached: int, new: int, window: int) -> torch.Tensor | None:
        if cached == 0 and new <= window:
            return None
        q_pos = cached + self._token_index[:new, None]
        kv_pos = self._token_index[None, : cached + new]
        return self._bias((kv_pos > q_pos) | (kv_pos <= q_pos - window))

    # --- computing -----------------------------------------------------------------------------

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        _write(layer, k, v, forward_batch.out_cache_loc)
        group, plan = self.groups[layer.group_id], self._extend_plans[layer.group_id]
        keys = _gather(layer.k_cache, plan.slots, q.dtype)
        values = _gather(layer.v_cache, plan.slots, q.dtype)
        heads = (group.num_kv_heads, group.num_qo_heads // group.num_kv_heads)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for span in plan.spans:
            # [new, heads, dim] -> [kv heads, query heads a kv head, new, dim]; K and V are expanded.
            queries = q[span.q_start : span.q_end]
            queries = queries.reshape(len(queries), *heads, group.head_dim).permute(1, 2, 0, 3)
            spread = [
                x[span.kv_start : span.kv_end].transpose(0, 1).unsqueeze(1).expand(-1, heads[1], -1, -1)
                for x in (keys, values)
            ]
            part = _attend(group, queries, spread[0], spread[1], span.bias, causal=True)
            out[span.q_start : span.q_end] = part.permute(2, 0, 1, 3).flatten(1, 2)
        return out

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        _write(layer, k, v, forward_batch.out_cache_loc)
        group, plan = self.groups[layer.group_id], self._decode_plans[layer.group_id]
        keys = _gather(layer.k_cache, plan.slots, q.dtype).transpose(1, 2)
        values = _gather(layer.v_cache, plan.slots, q.dtype).transpose(1, 2)
        # The query heads that share a KV head stand where a sequence would: K and V stay as they are.
        queries = q.reshape(q.shape[0], group.num_kv_heads, -1, group.head_dim)
        return _attend(group, queries, keys, values, plan.bias).reshape(q.shape)

    def captured_tensors(self) -> dict[str, torch.Tensor]:
        slots = {f"attention.slots.{i}": buffer for i, buffer in enumerate(self._static_slots)}
        return slots | {f"attention.bias.{i}": buffer for i, buffer in enumerate(self._static_bias)}


def _longest(seq_lens_cpu: torch.Tensor) -> int:
    return int(seq_lens_cpu.max()) if seq_lens_cpu.numel() else 0


def _slots_of(rows: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    pages = rows.gather(1, positions // page_size).long()
    return pages.mul_(page_size).add_(positions % page_size)


def _write(layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    # index_copy_ refuses a negative index; index_put_ would wrap it round to the last page.
    layer.k_cache.flatten(0, 1).index_copy_(0, slots, k.to(layer.k_cache.dtype))
    layer.v_cache.flatten(0, 1).index_copy_(0, slots, v.to(layer.v_cache.dtype))


def _gather(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[..., num_kv_heads, head_dim]` in `dtype`, for slots of any shape."""
    num_pages, page_size, num_heads, head_dim = cache.shape
    lines = cache.view(num_pages * page_size, num_heads * head_dim).index_select(0, slots.view(-1))
    return lines.view(*slots.shape, num_heads, head_dim).to(dtype)


def _attend(
    group: AttentionGroup,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool = False,
) -> torch.Tensor:
    """Attention of `q` `[b, h, n, d]` over `k`, `v` `[b, h, m, d]`; without `bias`, causal or full."""
    if bias is not None:
        bias = bias.to(q.dtype)
    # NOTE: no fused kernel knows the cap. And on CUDA torch's memory-efficient one, which takes a mask, is wrong
    # at some lengths where query heads share their keys by a stride of 0, as in prefill (pytorch#191937).
    if group.logits_soft_cap is None and not (causal and bias is not None and q.is_cuda):
        is_causal = causal and bias is None
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=is_causal, scale=group.sm_scale
        )
    if bias is None and causal:
        bias = q.new_full((q.shape[-2], k.shape[-2]), float("-inf")).triu(1)
    parts = []
    for start in range(0, q.shape[-2], _PLAIN_ROWS):
        rows = slice(start, start + _PLAIN_ROWS)
        parts.append(
            _attend_plainly(group, q[..., rows, :], k, v, None if bias is None else bias[..., rows, :])
        )
    return torch.cat(parts, dim=-2)


def _attend_plainly(
    group: AttentionGroup, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """As `_attend`, by the scores themselves, `[b, h, n, m]` float32; without `bias`, full."""
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * group.sm_scale
    if group.logits_soft_cap is not None:
        scores = group.logits_soft_cap * torch.tanh(scores / group.logits_soft_cap)
    if bias is not None:
        scores = scores + bias
    return torch.matmul(scores.softmax(dim=-1).to(v.dtype), v)
