"""The attention backend that a runner plans and calls.

A backend plans on the host before each step (`init_forward_metadata*`) and computes on the device
(`forward_*`). Layers with the same `AttentionGroup` share one plan: a model with sliding-window and
full layers has two groups, and planning once a model would be wrong for one of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch

from runners.forward_batch import ForwardBatch, ForwardMode


@dataclass(frozen=True)
class AttentionGroup:
    """Everything an attention plan depends on, equal for all layers of the group."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    #: Multiplies the scores before the softmax.
    sm_scale: float
    #: Tokens that a query sees, itself included; None for full attention.
    sliding_window: int | None = None
    #: Scores are passed through `cap * tanh(score / cap)`; None for none.
    logits_soft_cap: float | None = None


@dataclass(frozen=True)
class AttentionLayer:
    """One layer's view of the cache: `[num_pages, page_size, num_kv_heads, head_dim]` each."""

    group_id: int
    k_cache: torch.Tensor
    v_cache: torch.Tensor


class AttentionBackend(ABC):
    """Plans and computes attention over a paged KV cache."""

    #: Short name, as in `attention.backend`.
    name: str
    #: True if cache content past a request's length never reaches the output, even when it is NaN.
    masks_tail: bool
    #: True if a decode step looks up the pages of past tokens alone; the new one has its slot. So the pages
    #: that its own tokens open may reach the device after it.
    looks_up_past_only: bool = False
    #: What the plan of a replay is made from: `inputs`, the static inputs on the device, which then have to be there
    #: ahead of the graph; `lengths`, those that the host gives; or `nothing`: it only looks for a request that is too
    #: long, and is not called where there is none for certain.
    replay_plans_from: Literal["inputs", "lengths", "nothing"] = "inputs"
    #: Why `auto` took this backend in place of FlashInfer on a CUDA device; None if it did not.
    fallback_reason: str | None = None
    #: The static tensors that captured graphs read, without their names. Only ever replaced as a whole, so that a
    #: step need look at no more than this tuple.
    captured_parts: tuple[torch.Tensor, ...] = ()

    @abstractmethod
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the static metadata that captured graphs read, for up to `max_bs` requests."""

    @abstractmethod
    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length that a padding row must have so that every kernel stays in bounds and finite."""

    @abstractmethod
    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan an eager step (prefill or decode)."""

    @abstractmethod
    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        forward_mode: ForwardMode,
    ) -> None:
        """Plan for the capture of size `bs`; the static buffers hold padding rows only."""

    @abstractmethod
    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_sum: int,
        forward_mode: ForwardMode,
        seq_lens_cpu: torch.Tensor,
    ) -> None:
        """Plan a replay of size `bs` (padding rows included) into the captured addresses.

        Raises `PlanLayoutError` if the layout differs from the captured one.
        """

    @abstractmethod
    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        """Write `k`, `v` to the cache and attend causally.

        `q` is `[num_tokens, num_qo_heads, head_dim]`, `k` and `v` are
        `[num_tokens, num_kv_heads, head_dim]`; returns `[num_tokens, num_qo_heads, head_dim]`.
        """

    @abstractmethod
    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        """As `forward_extend`, with one token a request."""

    def settle(self) -> None:  # noqa: B027 - most backends have nothing to note
        """Do what a planned step still owes once it has been launched, while the device works."""

    def describe(self) -> dict[str, object]:
        """Return what the backend came to, for the record: plain values by name."""
        return {"backend": self.name, "fallback_reason": self.fallback_reason}

    def captured_tensors(self) -> dict[str, torch.Tensor]:
        """Return `captured_parts` by name (for the message of the stale check)."""
        return {}
