"""What FlashInfer can serve, and which of its kernels serve it best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from runners.attention.base import AttentionGroup
from runners.attention.flashinfer_adapter import PrefillKernel, is_installed

#: Not on and off: YAML reads those as booleans.
TensorCores = Literal["auto", "always", "never"]
PrefillChoice = Literal["auto", "fa2", "fa3"]

_HEAD_DIMS = (64, 128, 256)
QUERY_DTYPES = (torch.bfloat16, torch.float16)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
#: Query heads a KV head that the decode kernel is built for (`DISPATCH_GQA_GROUP_SIZE`).
_DECODE_GROUP_SIZES = (1, 2, 3, 4, 6, 8, 16)
#: From here on the tensor cores win over the decode kernel (SGLang's `should_use_tensor_core`).
_TENSOR_CORE_GROUP_SIZE = 4


def unusable_reason(
    groups: Sequence[AttentionGroup], kv_dtype: torch.dtype, q_dtype: torch.dtype | None = None
) -> str | None:
    """Return why FlashInfer cannot serve a model with these groups, or None if it can."""
    if not is_installed():
        return "flashinfer-python is not installed: install cudagraph-harness[gpu]"
    q_dtype = q_dtype or default_q_dtype(kv_dtype)
    if q_dtype not in QUERY_DTYPES:
        return f"it has no kernels for {q_dtype}: use model.dtype=bfloat16 or float16"
    if kv_dtype != q_dtype and kv_dtype not in FP8_DTYPES:
        return f"a {kv_dtype} cache does not serve {q_dtype} queries: use attention.kv_cache_dtype=auto"
    for group in groups:
        if group.head_dim not in _HEAD_DIMS:
            return f"it has no kernels for head_dim={group.head_dim}, only for {_HEAD_DIMS}"
        if kv_dtype in FP8_DTYPES and group.head_dim == 64:
            return "its prefill kernels misread an fp8 cache with head_dim=64"
    return None


def choose_tensor_cores(group: AttentionGroup, kv_dtype: torch.dtype, choice: TensorCores) -> bool:
    """Return whether decode attention of a group runs on the tensor-core kernels.

    `auto` follows SGLang: for an fp8 cache, from four query heads a KV head on, and where the decode
    kernel was not built for that many.
    """
    group_size = group.num_qo_heads // group.num_kv_heads
    if choice == "never" and group_size not in _DECODE_GROUP_SIZES:
        raise ValueError(
            f"attention.use_tensor_cores=never: the decode kernel has no build for {group_size} query heads a KV head, only "
            f"for {_DECODE_GROUP_SIZES}. Use auto."
        )
    if choice != "auto":
        return choice == "always"
    return (
        kv_dtype in FP8_DTYPES
        or group_size >= _TENSOR_CORE_GROUP_SIZE
        or group_size not in _DECODE_GROUP_SIZES
    )


def prefill_candidates(kv_dtype: torch.dtype, capability: tuple[int, int]) -> list[PrefillKernel]:
    """Return prefill kernels to try, best first, as FlashInfer's `auto` ranks them.

    FA3 on Hopper with a 16-bit cache; FA2 serves everything.
    """
    return ["fa3", "fa2"] if capability[0] == 9 and kv_dtype in QUERY_DTYPES else ["fa2"]


def default_q_dtype(kv_dtype: torch.dtype) -> torch.dtype:
    """Return the type of the queries that a cache of this type serves, if nobody says."""
    return torch.bfloat16 if kv_dtype in FP8_DTYPES else kv_dtype


def without_idle_window(group: AttentionGroup, max_seq_len: int) -> AttentionGroup:
    """A window that no request outgrows is full attention, whose kernels more machines have built."""
    if group.sliding_window is not None and group.sliding_window >= max_seq_len:
        return replace(group, sliding_window=None)
    return group
