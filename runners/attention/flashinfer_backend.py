"""Attention on FlashInfer's kernels: paged decode inside CUDA graphs, paged and ragged prefill.

The host plans each step from host lengths: how the work is split over the SMs. What the kernels read
besides the plan, the page lists with their offsets and last-page lengths, is written on the device by
the first layer of each forward pass, from the static inputs, and so is captured with it. A replay thus
costs the host one FlashInfer plan a group, with one queued copy, and none while a plan of the present
page counts would schedule what the last one did (`decode_schedule`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from runners.attention.base import AttentionBackend, AttentionGroup, AttentionLayer
from runners.attention.decode_planner import DecodeKernel, DecodePlanner
from runners.attention.flashinfer_adapter import (
    DecodeWrapper,
    FlashInfer,
    KernelShape,
    MissingKernelError,
    PrefillKernel,
)
from runners.attention.flashinfer_prefill import PagedPrefillWrapper, RaggedPrefillWrapper
from runners.attention.flashinfer_support import (
    PrefillChoice,
    TensorCores,
    choose_tensor_cores,
    default_q_dtype,
    prefill_candidates,
    unusable_reason,
    without_idle_window,
)
from runners.attention.flashinfer_workspace import Workspace, allocate_workspaces, prefill_token_limit
from runners.attention.host_pages import HostPages
from runners.attention.kv_write import write_kv
from runners.attention.page_indices import PageIndices, write_page_indices
from runners.errors import RunnerError
from runners.forward_batch import ForwardBatch, ForwardMode
from runners.paged_kv import PagedKV


@dataclass
class _ExtendStep:
    """Who computes a prefill step, and the device inputs that its page lists are made from."""

    wrappers: Sequence[PagedPrefillWrapper] | Sequence[RaggedPrefillWrapper]
    rows: torch.Tensor
    seq_lens: torch.Tensor


class FlashInferAttentionBackend(AttentionBackend):
    """Plans and computes attention with FlashInfer, one decode wrapper per capture size and group.

    All wrappers share a float workspace, an integer workspace per group, one set of page lists and a
    ring of pinned staging buffers.

    Args:
        groups, kv, max_batch_size, max_seq_len, device: as every backend.
        q_dtype: of the queries; None for the cache's, or bfloat16 where that is fp8.
        use_tensor_cores: for decode; see `choose_tensor_cores`.
        prefill: kernel family. `auto` takes FA3 where it fits and can be had, FA2 otherwise.
        workspace_bytes: size of the float workspace; None for what the limits need.

    Attributes:
        prefill_kernels: what `prefill` came to, per group.
        uses_tensor_cores: what `use_tensor_cores` came to, per group.
        decode: the planner of decode steps; counts plans, and replays that needed none.

    Raises RunnerError (MissingKernelError if a kernel is not built and may not be) or ValueError, before
    anything is captured.
    """

    name = "flashinfer"
    # The kernels load keys and values under a predicate on the request's length, fill values with zero
    # and replace the scores past the end (decode.cuh, prefill.cuh, hopper/sparse_mainloop.cuh).
    masks_tail = True
    # `write_page_indices` takes the page of the new token from its slot.
    looks_up_past_only = True
    replay_plans_from = "lengths"

    def __init__(
        self,
        groups: Sequence[AttentionGroup],
        kv: PagedKV,
        *,
        max_batch_size: int,
        max_seq_len: int,
        device: torch.device,
        q_dtype: torch.dtype | None = None,
        use_tensor_cores: TensorCores = "auto",
        prefill: PrefillChoice = "auto",
        workspace_bytes: int | None = None,
    ) -> None:
        self.kv = kv
        self.max_batch_size = max_batch_size
        self.max_prefill_tokens = prefill_token_limit(max_batch_size, max_seq_len)
        self.device = device
        self.groups = [without_idle_window(group, max_seq_len) for group in groups]
        self._q_dtype = q_dtype or default_q_dtype(kv.dtype)
        reason = unusable_reason(self.groups, kv.dtype, self._q_dtype)
        if reason is not None:
            raise ValueError(f"attention.backend=flashinfer: {reason}, or use attention.backend=torch.")
        self.uses_tensor_cores = [
            choose_tensor_cores(group, kv.dtype, use_tensor_cores) for group in self.groups
        ]
        self._library = FlashInfer()
        self._shapes = [KernelShape(group, kv.page_size, self._q_dtype, kv.dtype) for group in self.groups]
        self._workspaces = allocate_workspaces(
            self.groups,
            max_batch_size=max_batch_size,
            max_prefill_tokens=self.max_prefill_tokens,
            num_sms=torch.cuda.get_device_properties(device).multi_processor_count,
            device=device,
            workspace_bytes=workspace_bytes,
        )
        max_pages = kv.page_table.shape[1]
        self._pages = PageIndices.allocate(max_batch_size, max_pages, device)
        self._host_pages = HostPages(max_batch_size, kv.page_size, max_pages)
        self._extend: _ExtendStep | None = None
        self._build_prefill(prefill)
        self.decode = DecodePlanner(self._make_decode_kernels, self._host_pages)
        self._load_decode_kernels()
        self._captured_tensors = self._list_captured_tensors()
        self.captured_parts = tuple(self._captured_tensors.values())

    # --- building ------------------------------------------------------------------------------

    def _make_decode_kernels(self, batch_size: int | None) -> list[DecodeKernel]:
        parts = zip(self._shapes, self._workspaces, self.uses_tensor_cores, strict=True)
        return [
            DecodeWrapper(
                self._library,
                shape,
                workspace,
                self._pages,
                batch_size=batch_size,
                use_tensor_cores=tensor_cores,
            )
            for shape, workspace, tensor_cores in parts
        ]

    def _load_decode_kernels(self) -> None:
        """Plan one token, so that a missing kernel is known before the first capture."""
        nowhere = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.decode.plan_eager(nowhere, nowhere, torch.ones(1, dtype=torch.int32))

    def _build_prefill(self, choice: PrefillChoice) -> None:
        self.prefill_kernels: list[PrefillKernel] = []
        self._paged: list[PagedPrefillWrapper] = []
        self._ragged: list[RaggedPrefillWrapper] = []
        for shape, workspace in zip(self._shapes, self._workspaces, strict=True):
            kernel, paged = self._load_prefill(shape, workspace, choice)
            self.prefill_kernels.append(kernel)
            self._paged.append(paged)
            self._ragged.append(RaggedPrefillWrapper(self._library, shape, workspace, kernel))

    def _load_prefill(
        self, shape: KernelShape, workspace: Workspace, choice: PrefillChoice
    ) -> tuple[PrefillKernel, PagedPrefillWrapper]:
        """Return the first kernel of the choice that can be had, with one token planned on it."""
        capability = torch.cuda.get_device_capability(self.device)
        candidates = [choice] if choice != "auto" else prefill_candidates(shape.kv_dtype, capability)
        for kernel in candidates:
            wrapper = PagedPrefillWrapper(self._library, shape, workspace, self._pages, kernel)
            self._host_pages.count(torch.ones(1, dtype=torch.int32))
            self._host_pages.lay_out()
            try:
                wrapper.plan(self._host_pages.indptr, self._host_pages)
            except MissingKernelError:
                if kernel == candidates[-1]:
                    raise
                continue
            return kernel, wrapper
        raise AssertionError("there is at least one candidate")

    # --- planning ------------------------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Forget earlier captures. The buffers are there already, for `max_batch_size` requests."""
        if max_bs > self.max_batch_size:
            raise RunnerError(
                f"graphs of {max_bs} requests do not fit an attention backend for {self.max_batch_size}: raise "
                "runner.max_batch_size, or lower capture.max_size."
            )
        self.decode.forget_captures()

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        # Length 0 has no page: the last-page length would be wrong, and the softmax empty.
        return 1

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        batch = forward_batch
        if batch.forward_mode.is_extend():
            self._extend = self._plan_extend(batch)
        else:
            self.decode.plan_eager(batch.req_pool_indices, batch.seq_lens, batch.seq_lens_cpu)

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        forward_mode: ForwardMode,
    ) -> None:
        fill = self.get_cuda_graph_seq_len_fill_value()
        self.decode.plan_capture(bs, req_pool_indices, seq_lens, fill)

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_sum: int,
        forward_mode: ForwardMode,
        seq_lens_cpu: torch.Tensor,
    ) -> None:
        self.decode.plan_replay(bs, req_pool_indices, seq_lens, seq_lens_cpu)

    def _plan_extend(self, batch: ForwardBatch) -> _ExtendStep:
        assert batch.extend_seq_lens_cpu is not None, "a prefill step says how many tokens are new"
        self._check_prefill(batch)
        self.decode.forget_plan()  # prefill plans into the same workspaces
        new_tokens = np.array([0, *batch.extend_seq_lens_cpu], dtype=np.int32)
        qo_indptr = torch.from_numpy(np.cumsum(new_tokens, dtype=np.int32))
        if self._can_run_ragged(batch):
            for ragged in self._ragged:
                ragged.plan(qo_indptr)
            return _ExtendStep(self._ragged, batch.req_pool_indices, batch.seq_lens)
        self._host_pages.count(batch.seq_lens_cpu)
        self._host_pages.lay_out()
        for paged in self._paged:
            paged.plan(qo_indptr, self._host_pages)
        return _ExtendStep(self._paged, batch.req_pool_indices, batch.seq_lens)

    def _can_run_ragged(self, batch: ForwardBatch) -> bool:
        """Whole prompts need no pages. Through an fp8 cache they do: later steps read rounded keys."""
        has_prefix = batch.extend_seq_lens_cpu != batch.seq_lens_cpu.tolist()
        return not has_prefix and self.kv.dtype == self._q_dtype

    def _check_prefill(self, batch: ForwardBatch) -> None:
        if batch.batch_size > self.max_batch_size or batch.num_tokens > self.max_prefill_tokens:
            raise RunnerError(
                f"a prefill step of {batch.batch_size} requests and {batch.num_tokens} tokens is beyond FlashInfer's "
                f"workspace for {self.max_batch_size} requests and {self.max_prefill_tokens} tokens: prefill in "
                "smaller chunks."
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
        step = self._extend
        assert step is not None, "forward_extend before init_forward_metadata"
        wrapper = step.wrappers[layer.group_id]
        if isinstance(wrapper, RaggedPrefillWrapper):
            write_kv(layer.k_cache, layer.v_cache, k, v, forward_batch.out_cache_loc)
            return wrapper.run(q, k, v)
        if self._is_first(layer):
            self._write_page_indices(step.rows, step.seq_lens)
        write_kv(layer.k_cache, layer.v_cache, k, v, forward_batch.out_cache_loc)
        return wrapper.run(q, layer.k_cache, layer.v_cache)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        step = self.decode.step
        assert step is not None, "forward_decode before a plan"
        # NOTE: the page lists come before write_kv. The decode kernel may start while its predecessor in
        # the stream still runs (programmatic dependent launch), and reads them before it waits.
        if self._is_first(layer):
            self._write_page_indices(step.rows, step.seq_lens, forward_batch.out_cache_loc)
        write_kv(layer.k_cache, layer.v_cache, k, v, forward_batch.out_cache_loc)
        return step.kernels[layer.group_id].run(q, layer.k_cache, layer.v_cache)

    def _is_first(self, layer: AttentionLayer) -> bool:
        return layer.k_cache.data_ptr() == self.kv.k_cache[0].data_ptr()

    def _write_page_indices(
        self, rows: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor | None = None
    ) -> None:
        write_page_indices(self._pages, self.kv.page_table, rows, seq_lens, self.kv.page_size, slots)

    # --- what it holds -------------------------------------------------------------------------

    def settle(self) -> None:
        for workspace in self._workspaces:
            workspace.staging.settle()
        self.decode.settle()

    def captured_tensors(self) -> dict[str, torch.Tensor]:
        return self._captured_tensors

    def _list_captured_tensors(self) -> dict[str, torch.Tensor]:
        workspaces = {f"attention.int_workspace.{i}": w.int_buffer for i, w in enumerate(self._workspaces)}
        return {
            "attention.indptr": self._pages.indptr,
            "attention.indices": self._pages.indices,
            "attention.last_page_len": self._pages.last_page_len,
            "attention.float_workspace": self._workspaces[0].float_buffer,
        } | workspaces

    def describe(self) -> dict[str, object]:
        memory = {f"{name}_bytes": num_bytes for name, num_bytes in self.memory().items()}
        return {
            **super().describe(),
            "version": ".".join(map(str, self._library.version)),
            "uses_private_parts": self._library.uses_private_parts,
            "prefill": list(self.prefill_kernels),
            "use_tensor_cores": list(self.uses_tensor_cores),
            **memory,
        }

    def memory(self) -> dict[str, int]:
        """Return what the shared buffers cost, in bytes, by purpose; `pinned` is host memory."""
        return {
            "float_workspace": self._workspaces[0].float_buffer.nbytes,
            "int_workspace": sum(w.int_buffer.nbytes for w in self._workspaces),
            "page_indices": self._pages.num_bytes,
            "pinned": sum(w.staging.pinned_bytes for w in self._workspaces),
        }
