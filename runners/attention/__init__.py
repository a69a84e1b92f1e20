"""Attention backends by name. A backend's module is imported when it is asked for."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from runners.attention.base import AttentionBackend, AttentionGroup

if TYPE_CHECKING:
    from runners.attention.flashinfer_support import PrefillChoice, TensorCores
    from runners.paged_kv import PagedKV

#: `attention.backend` values that name a backend; `auto` picks one of them by device.
BACKENDS = ("torch", "flashinfer", "triton")


@dataclass(frozen=True)
class AttentionOptions:
    """What a backend is built for."""

    max_batch_size: int
    max_seq_len: int
    device: torch.device
    #: Of the queries: the model's. None: the cache's.
    q_dtype: torch.dtype | None = None
    #: FlashInfer's choices, see `runners.attention.flashinfer_support`.
    use_tensor_cores: TensorCores = "auto"
    prefill: PrefillChoice = "auto"
    #: The model's layers are fused: our own decode kernel takes their merged projection as it is.
    fused: bool = False


def create_attention_backend(
    name: str, groups: Sequence[AttentionGroup], kv: PagedKV, options: AttentionOptions
) -> AttentionBackend:
    """Build the backend called `name` for a model's attention groups over the cache `kv`.

    `auto` is FlashInfer on CUDA where that can serve the model, and torch elsewhere; on CUDA with a
    warning and the reason in `fallback_reason`. For fused layers it is Triton on CUDA.

    Raises ValueError for a name that is unknown or not usable here, and RunnerError
    (MissingKernelError among them) where FlashInfer was asked for and cannot be had.
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"attention.backend={name}: choose one of auto, {', '.join(BACKENDS)}.")
    on_cuda = options.device.type == "cuda"
    if name == "torch" or (name == "auto" and not on_cuda):
        return _torch_backend(groups, kv, options)
    if not on_cuda:
        raise ValueError(
            f"attention.backend={name}: it needs a CUDA device, this run is on {options.device}. "
            "Use attention.backend=torch."
        )
    if name == "flashinfer":
        return _flashinfer_backend(groups, kv, options)
    if name == "triton" or options.fused:
        return _triton_backend(name, groups, kv, options)
    return _best_on_cuda(groups, kv, options)


def _triton_backend(
    name: str, groups: Sequence[AttentionGroup], kv: PagedKV, options: AttentionOptions
) -> AttentionBackend:
    """Our kernel for decode over the best there is for prefill; `auto` does without where it cannot serve."""
    from runners.attention.triton_backend import TritonAttentionBackend, unusable_reason

    best = _best_on_cuda(groups, kv, options)
    if name == "auto" and unusable_reason(groups) is not None:
        return best
    backend = TritonAttentionBackend(
        groups,
        kv,
        best,
        max_batch_size=options.max_batch_size,
        max_seq_len=options.max_seq_len,
        device=options.device,
    )
    backend.looks_up_past_only = options.fused
    return backend


def _best_on_cuda(
    groups: Sequence[AttentionGroup], kv: PagedKV, options: AttentionOptions
) -> AttentionBackend:
    from runners.attention.flashinfer_adapter import MissingKernelError
    from runners.attention.flashinfer_support import unusable_reason

    reason = unusable_reason(groups, kv.dtype, options.q_dtype)
    if reason is None:
        try:
            return _flashinfer_backend(groups, kv, options)
        except MissingKernelError as error:
            reason = str(error)
    backend = _torch_backend(groups, kv, options)
    backend.fallback_reason = reason
    warnings.warn(
        f"attention.backend=auto runs torch and not FlashInfer, many times slower: {reason}",
        RuntimeWarning,
        stacklevel=4,
    )
    return backend


def _torch_backend(
    groups: Sequence[AttentionGroup], kv: PagedKV, options: AttentionOptions
) -> AttentionBackend:
    from runners.attention.torch_backend import TorchAttentionBackend

    if kv.dtype.itemsize == 1:
        raise ValueError(
            f"attention.backend=torch cannot compute over a {kv.dtype} cache: use attention.backend=flashinfer "
            "on CUDA, or attention.kv_cache_dtype=auto."
        )
    return TorchAttentionBackend(
        groups,
        kv,
        max_batch_size=options.max_batch_size,
        max_seq_len=options.max_seq_len,
        device=options.device,
    )


def _flashinfer_backend(
    groups: Sequence[AttentionGroup], kv: PagedKV, options: AttentionOptions
) -> AttentionBackend:
    from runners.attention.flashinfer_backend import FlashInferAttentionBackend

    return FlashInferAttentionBackend(
        groups,
        kv,
        max_batch_size=options.max_batch_size,
        max_seq_len=options.max_seq_len,
        device=options.device,
        q_dtype=options.q_dtype,
        use_tensor_cores=options.use_tensor_cores,
        prefill=options.prefill,
    )
