"""Prefill on FlashInfer's wrappers, planned by their public calls."""

from __future__ import annotations

import functools

import torch

from runners.attention.flashinfer_adapter import FlashInfer, KernelShape, PrefillKernel, Wrapper
from runners.attention.flashinfer_workspace import Workspace
from runners.attention.host_pages import HostPages
from runners.attention.page_indices import PageIndices


class PagedPrefillWrapper(Wrapper):
    """Plans and runs causal prefill over the pages: chunks, and prompts with a cached prefix."""

    def __init__(
        self,
        library: FlashInfer,
        shape: KernelShape,
        workspace: Workspace,
        pages: PageIndices,
        kernel: PrefillKernel,
    ) -> None:
        wrapper = library.package.BatchPrefillWithPagedKVCacheWrapper(
            workspace.float_buffer, "NHD", backend=kernel
        )
        super().__init__(library, wrapper, shape, workspace)
        self._pages = pages

    def plan(self, qo_indptr: torch.Tensor, pages: HostPages) -> None:
        """Schedule a batch whose request `i` brings the tokens `qo_indptr[i] : qo_indptr[i + 1]`.

        `qo_indptr` is `[batch_size + 1]` int32 on the host.
        """
        group = self.shape.group
        self.stage_first(
            functools.partial(
                self._wrapper.plan,
                qo_indptr,
                pages.indptr,
                self._pages.indices,
                pages.last_page_len,
                group.num_qo_heads,
                group.num_kv_heads,
                group.head_dim,
                self.shape.page_size,
                causal=True,
                **self.shape.options(),
            )
        )

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """Return the attention of `q` `[num_tokens, num_qo_heads, head_dim]` over the planned pages."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._wrapper.run(q, (k_cache, v_cache), out=out)
        return out


class RaggedPrefillWrapper(Wrapper):
    """Plans and runs causal prefill of whole prompts, straight from their keys and values."""

    def __init__(
        self, library: FlashInfer, shape: KernelShape, workspace: Workspace, kernel: PrefillKernel
    ) -> None:
        wrapper = library.package.BatchPrefillWithRaggedKVCacheWrapper(
            workspace.float_buffer, "NHD", backend=kernel
        )
        super().__init__(library, wrapper, shape, workspace)

    def plan(self, qo_indptr: torch.Tensor) -> None:
        """Schedule prompts of these lengths; `qo_indptr` is `[batch_size + 1]` int32 on the host."""
        group = self.shape.group
        self.stage_first(
            functools.partial(
                self._wrapper.plan,
                qo_indptr,
                qo_indptr,
                group.num_qo_heads,
                group.num_kv_heads,
                group.head_dim,
                causal=True,
                **self.shape.options(),
            )
        )

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the attention of `q` over `k` and `v` `[num_tokens, num_kv_heads, head_dim]`."""
        out: torch.Tensor = self._wrapper.run(q, k, v)
        return out
