"""FlashInfer in 16 bits beside the torch reference in float32, over the same pages and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from runners.attention.base import AttentionGroup, AttentionLayer
from runners.attention.flashinfer_adapter import MissingKernelError
from runners.attention.flashinfer_backend import FlashInferAttentionBackend
from runners.attention.torch_backend import TorchAttentionBackend
from runners.forward_batch import ForwardBatch, ForwardMode
from runners.graph_backend import DecodeGraph, create_graph, side_stream
from runners.input_buffers import InputBuffers
from runners.paged_kv import PagedKV

Outputs = list[torch.Tensor]


class AttentionRig:
    """A model's attention without the model: one layer per group, queries and new keys drawn at random.

    Skips the test if FlashInfer is missing, or has no kernel for the shapes and may not compile one.
    """

    def __init__(
        self,
        device: torch.device,
        groups: Sequence[AttentionGroup],
        *,
        page_size: int = 16,
        max_batch_size: int = 16,
        max_seq_len: int = 1024,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
        self.device, self.groups, self.dtype = device, list(groups), dtype
        limits = {"max_batch_size": max_batch_size, "max_seq_len": max_seq_len, "device": device}
        pool: dict[str, Any] = {
            "num_pages": max_batch_size * -(-max_seq_len // page_size) + 1,
            "page_size": page_size,
            "max_requests": max_batch_size,
            "max_seq_len": max_seq_len,
            "device": device,
        }
        self.kv = PagedKV(groups, dtype=kv_dtype or dtype, **pool)
        self.exact_kv = PagedKV(groups, dtype=torch.float32, **pool)
        self._fill_caches()
        try:
            self.backend = FlashInferAttentionBackend(groups, self.kv, q_dtype=dtype, **limits, **options)
        except MissingKernelError as error:
            pytest.skip(str(error))
        self.reference = TorchAttentionBackend(groups, self.exact_kv, **limits)
        self.buffers = InputBuffers(max_batch_size, 1, device)
        #: Of the last comparison, a layer each.
        self.errors: list[float] = []
        self.lengths: dict[int, int] = {}
        self.graphs: dict[int, DecodeGraph] = {}
        self.outputs: dict[int, Outputs] = {}
        self.static_qkv = self._draw(max_batch_size)

    def _fill_caches(self) -> None:
        """Whatever page a request gets holds keys and values already, the same in both caches."""
        rounded = (*self.kv.k_cache, *self.kv.v_cache)
        for cache, exact in zip(rounded, (*self.exact_kv.k_cache, *self.exact_kv.v_cache), strict=True):
            cache.copy_(torch.randn(cache.shape, device=self.device))
            exact.copy_(cache)

    def _draw(self, num_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        def states(num_heads: int, head_dim: int) -> torch.Tensor:
            # Heads first in memory, as transformers' layers hand them over.
            shape = (num_heads, num_tokens, head_dim)
            return torch.randn(shape, dtype=self.dtype, device=self.device).transpose(0, 1)

        return [
            (
                states(g.num_qo_heads, g.head_dim),
                states(g.num_kv_heads, g.head_dim),
                states(g.num_kv_heads, g.head_dim),
            )
            for g in self.groups
        ]

    # --- requests ------------------------------------------------------------------------------

    def start(self, *lengths: int) -> list[int]:
        """Add requests with so many tokens in the cache; return their rows."""
        rows = []
        for length in lengths:
            row = self.kv.add_request()
            assert self.exact_kv.add_request() == row
            self.lengths[row] = 0
            self._grow(row, length)
            rows.append(row)
        return rows

    def _grow(self, row: int, new: int) -> None:
        self.lengths[row] += new
        assert self.kv.extend(row, self.lengths[row]) and self.exact_kv.extend(row, self.lengths[row])

    def batch(self, rows: Sequence[int], new: Sequence[int] | None = None) -> ForwardBatch:
        """The next step of `rows`, on the host: a decode step, or a prefill of `new` tokens each."""
        counts = list(new or [1] * len(rows))
        if new is None:
            lens = np.array([self.lengths[row] + 1 for row in rows], dtype=np.int32)
            assert self.kv.open_pages(np.array(rows, dtype=np.int32), lens)
            self.kv.flush_urgent()  # the device does not know the pages that this step opens
        for row, count in zip(rows, counts, strict=True):
            self._grow(row, count)
        if new is not None:
            self.kv.flush()
        self.exact_kv.flush()
        ends = [self.lengths[row] for row in rows]
        spans = [self.kv.slots(row, end - n, end) for row, end, n in zip(rows, ends, counts, strict=True)]
        lengths, tokens = torch.tensor(ends, dtype=torch.int32), torch.zeros(sum(counts), dtype=torch.int64)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE if new is None else ForwardMode.EXTEND,
            batch_size=len(rows),
            input_ids=tokens,
            positions=tokens,
            req_pool_indices=torch.tensor(rows, dtype=torch.int32),
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            seq_lens_sum=sum(ends),
            out_cache_loc=torch.from_numpy(np.concatenate(spans)),
            extend_seq_lens_cpu=None if new is None else counts,
        )

    # --- steps ---------------------------------------------------------------------------------

    def run_eager(self, batch: ForwardBatch) -> float:
        """Run a step without a graph; return the relative error against the reference."""
        batch, qkv = batch.to(self.device), self._draw(batch.num_tokens)
        self.backend.init_forward_metadata(batch)
        got = self._forward(batch, qkv)
        return self.error(got, self.expected(batch, qkv))

    def capture(self, *sizes: int) -> None:
        """Capture sizes, largest first, as the runner does."""
        self.backend.init_cuda_graph_state(max(sizes), max(sizes))
        pool = torch.cuda.graph_pool_handle()
        with side_stream(self.device):
            for size in sorted(sizes, reverse=True):
                static = self.buffers.static_batch(size)
                self.backend.init_forward_metadata_capture_cuda_graph(
                    size, size, static.req_pool_indices, static.seq_lens, ForwardMode.DECODE
                )
                self._forward(static, self.inputs(size))
                torch.cuda.synchronize()
                self.graphs[size] = create_graph(self.device)
                self.graphs[size].capture(lambda s=size, b=static: self._capture_step(s, b), pool)

    def _capture_step(self, size: int, static: ForwardBatch) -> None:
        self.outputs[size] = self._forward(static, self.inputs(size))

    def replay(self, batch: ForwardBatch, size: int) -> Outputs:
        """Plan and replay; return views of the real rows of each layer's output. Nothing waits."""
        n, static = batch.batch_size, self.buffers.static_batch(size)
        self.buffers.populate(batch)
        self.backend.init_forward_metadata_replay_cuda_graph(
            size,
            static.req_pool_indices,
            static.seq_lens,
            batch.seq_lens_sum + size - n,
            ForwardMode.DECODE,
            self.buffers.seq_lens_cpu[:size],
        )
        self.graphs[size].replay()
        self.backend.settle()
        return [out[:n] for out in self.outputs[size]]

    def check_replay(self, batch: ForwardBatch, size: int) -> float:
        """Replay on fresh numbers; return the relative error against the reference."""
        for group in self.static_qkv:
            for states in group:
                states.normal_()
        got = [out.clone() for out in self.replay(batch, size)]
        return self.error(got, self.expected(batch.to(self.device), self.inputs(batch.batch_size)))

    def expected(self, batch: ForwardBatch, qkv: Sequence[tuple[torch.Tensor, ...]]) -> Outputs:
        """What the reference computes, on the keys as the cache holds them."""
        self.reference.init_forward_metadata(batch)
        is_extend = batch.forward_mode.is_extend()
        forward = self.reference.forward_extend if is_extend else self.reference.forward_decode
        outputs = []
        for i, (q, k, v) in enumerate(qkv):
            k, v = k.to(self.kv.dtype).float(), v.to(self.kv.dtype).float()
            layer = AttentionLayer(i, self.exact_kv.k_cache[i], self.exact_kv.v_cache[i])
            outputs.append(forward(q.float(), k, v, layer, batch))
        return outputs

    def error(self, got: Outputs, expected: Outputs) -> float:
        """The largest relative error of a layer, ‖got − expected‖ / ‖expected‖; infinite with a NaN."""
        self.errors = [((g.float() - e).norm() / e.norm()).item() for g, e in zip(got, expected, strict=True)]
        return float("inf") if np.isnan(self.errors).any() else max(self.errors)

    def inputs(self, size: int) -> list[tuple[torch.Tensor, ...]]:
        """The static queries, keys and values of a captured size, per layer."""
        return [tuple(states[:size] for states in group) for group in self.static_qkv]

    def _forward(self, batch: ForwardBatch, qkv: Sequence[tuple[torch.Tensor, ...]]) -> Outputs:
        is_extend = batch.forward_mode.is_extend()
        forward = self.backend.forward_extend if is_extend else self.backend.forward_decode
        layers = [AttentionLayer(i, self.kv.k_cache[i], self.kv.v_cache[i]) for i in range(len(self.groups))]
        return [forward(q, k, v, layer, batch) for (q, k, v), layer in zip(qkv, layers, strict=True)]
