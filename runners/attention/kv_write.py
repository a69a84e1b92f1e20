"""Writes a step's keys and values to the paged cache, both in one kernel."""

from __future__ import annotations

import torch


def write_kv(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store token `i` of `k` and `v` in slot `slots[i]` of the caches, in the caches' dtype.

    Args:
        k_cache, v_cache: `[num_pages, page_size, num_kv_heads, head_dim]`, contiguous.
        k, v: `[num_tokens, num_kv_heads, head_dim]`; any strides over tokens and heads.
        slots: `[num_tokens]` int64; a negative slot is not written (as an index it would wrap round).

    One kernel rather than two `index_copy_` or FlashInfer's page append: a decode step is a row of short
    kernels, and the slot is already known, so no page list has to be searched for it.
    """
    if k_cache.device.type == "cuda":
        from runners.attention.triton_kernels import launch_write_kv

        launch_write_kv(k_cache, v_cache, k, v, slots)
    else:
        write_kv_torch(k_cache, v_cache, k, v, slots)


def write_kv_torch(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> None:
    """The plain twin of the kernel. Reads sizes on the host, so not for a captured step."""
    kept = slots >= 0
    k_cache.flatten(0, 1)[slots[kept]] = k[kept].to(k_cache.dtype)
    v_cache.flatten(0, 1)[slots[kept]] = v[kept].to(v_cache.dtype)
