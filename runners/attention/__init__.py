"""Attention backends by name. A backend's module is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from runners.attention.base import AttentionBackend, AttentionGroup

if TYPE_CHECKING:
    from runners.paged_kv import PagedKV

#: `attention.backend` values that name a backend; `auto` picks one of them by device.
BACKENDS = ("torch", "flashinfer")


def resolve_attention_backend(name: str, device: torch.device) -> str:
    """Return the backend that `name` (`auto`, `torch`, `flashinfer`) means on `device`."""
    if name == "auto":
        # FlashInfer takes over on CUDA once its backend is here.
        return "torch"
    if name not in BACKENDS:
        raise ValueError(f"attention.backend={name}: choose one of auto, {', '.join(BACKENDS)}.")
    if name == "flashinfer" and device.type != "cuda":
        raise ValueError(
            f"attention.backend=flashinfer: FlashInfer needs a CUDA device, this run is on {device}. "
            "Use attention.backend=torch."
        )
    return name


def create_attention_backend(
    name: str,
    groups: Sequence[AttentionGroup],
    kv: PagedKV,
    *,
    max_batch_size: int,
    max_seq_len: int,
    device: torch.device,
) -> AttentionBackend:
    """Build the backend called `name` for a model's attention groups over the cache `kv`.

    Raises ValueError for a name that is unknown, not usable on `device`, or not yet available.
    """
    resolved = resolve_attention_backend(name, device)
    if resolved == "flashinfer":
        raise ValueError("attention.backend=flashinfer: not yet available. Use attention.backend=torch.")
    from runners.attention.torch_backend import TorchAttentionBackend

    return TorchAttentionBackend(
        groups, kv, max_batch_size=max_batch_size, max_seq_len=max_seq_len, device=device
    )
