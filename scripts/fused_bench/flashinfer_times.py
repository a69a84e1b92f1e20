"""FlashInfer's decode attention beside ours, where it is installed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fused_bench.rig import CONTEXT, DEVICE, Dims
from runners.models.fused.gemm_choice import time_in_graph
from runners.paged_kv import PagedKV


def flashinfer_decode(
    dims: Dims, kv: PagedKV, bs: int, tensor_cores: bool
) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """A planned FlashInfer decode over the first `bs` requests, at CUDA-graph settings."""
    import flashinfer

    pages = -(-CONTEXT // 16)
    indptr = torch.arange(bs + 1, dtype=torch.int32) * pages
    indices = kv.page_table[1 : bs + 1, :pages].reshape(-1).contiguous()
    last = torch.full((bs,), CONTEXT - (pages - 1) * 16, dtype=torch.int32)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(256 << 20, dtype=torch.uint8, device=DEVICE), "NHD", use_cuda_graph=True,
        use_tensor_cores=tensor_cores, paged_kv_indptr_buffer=indptr.to(DEVICE),
        paged_kv_indices_buffer=indices.clone(), paged_kv_last_page_len_buffer=last.to(DEVICE),
    )  # fmt: skip
    wrapper.plan(
        indptr, indices, last, dims.heads, dims.kv_heads, dims.head_dim, 16,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    return lambda q, layer: wrapper.run(q, (kv.k_cache[layer], kv.v_cache[layer]))


def time_flashinfer(dims: Dims, kv: PagedKV, bs: int, layers: int) -> dict[str, float]:
    q = torch.randn(bs, dims.heads, dims.head_dim, dtype=torch.bfloat16, device=DEVICE)
    times = {}
    for tensor_cores in (False, True):
        decode = flashinfer_decode(dims, kv, bs, tensor_cores)
        repeat = 4 if bs < 32 else 1
        took = time_in_graph(lambda d=decode, r=repeat: [d(q, i) for _ in range(r) for i in range(layers)], 5)
        times[f"flashinfer tc={int(tensor_cores)}"] = took / layers / repeat
    return times
