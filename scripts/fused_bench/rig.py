"""What the parts of the benchmark share: sizes, random models, caches and batches."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from runners.attention.base import AttentionGroup
from runners.attention.torch_backend import TorchAttentionBackend
from runners.attention.triton_backend import TritonAttentionBackend
from runners.forward_batch import ForwardBatch, ForwardMode
from runners.models.context import forward_context
from runners.models.fused.layers import FusedAttention, FusedDecoder, FusedLayer
from runners.models.fused.qk_rope_cache import QkvLayout
from runners.models.fused.skinny_gemm import Product
from runners.paged_kv import PagedKV

BATCHES = (1, 8, 32, 128)
CONTEXT = 512
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
#: What every part adds to; the file at the end.
RESULTS: dict[str, Any] = {"errors": {}}


@dataclass(frozen=True)
class Dims:
    """The sizes of a Qwen3 model."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool

    @property
    def layout(self) -> QkvLayout:
        return QkvLayout(self.heads, self.kv_heads, self.head_dim, 1e-6)

    @property
    def group(self) -> AttentionGroup:
        return AttentionGroup(self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5)

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Product → (n, k)."""
        return {
            "qkv": (self.layout.num_heads * self.head_dim, self.hidden),
            "output": (self.hidden, self.heads * self.head_dim),
            "gate_up": (self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "head": (self.vocab, self.hidden),
        }


ALL_DIMS = {
    "0.6b": Dims("0.6b", 1024, 28, 16, 8, 128, 3072, 151936, True),
    "8b": Dims("8b", 4096, 36, 32, 8, 128, 12288, 151936, False),
}


@contextmanager
def part(name: str, quiet: bool = False) -> Iterator[None]:
    """A part that may fail without ending the run."""
    start = time.time()
    try:
        yield
    except Exception as error:
        RESULTS["errors"][name] = traceback.format_exc()
        print(f"!! {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    if not quiet:
        print(f"-- {name}: {time.time() - start:.1f} s", flush=True)


def random_decoder(
    dims: Dims, dtype: torch.dtype = torch.bfloat16, device: torch.device = DEVICE
) -> FusedDecoder:
    """A fused model with random weights; its norms are folded already."""

    def weight(n: int, k: int) -> torch.Tensor:
        return torch.empty(n, k, dtype=dtype, device=device).normal_(std=k**-0.5)

    def norm(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device).uniform_(0.5, 1.5)

    def layer() -> FusedLayer:
        qkv = Product(weight(*shapes["qkv"]), scaled=True, eps=1e-6)
        output = Product(weight(*shapes["output"]), residual=True)
        attention = FusedAttention(dims.layout, qkv, output, norm(dims.head_dim), norm(dims.head_dim))
        n, k = shapes["gate_up"]
        gate_up = Product(weight(2 * n, k), scaled=True, eps=1e-6, silu=True)
        return FusedLayer(attention, gate_up, Product(weight(*shapes["down"]), residual=True))

    shapes = dims.shapes()
    embedding = torch.empty(dims.vocab, dims.hidden, dtype=dtype, device=device).normal_()
    head_norm = norm(dims.hidden) if dims.tied else None
    head_weight = embedding if dims.tied else weight(*shapes["head"])
    head = Product(head_weight, scaled=True, norm=head_norm, eps=1e-6, argmax=True)
    angles = torch.arange(4096, device=device)[:, None] * 1e6 ** -torch.linspace(
        0, 1, dims.head_dim // 2, device=device
    )
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    return FusedDecoder(embedding, [layer() for _ in range(dims.layers)], head, cos_sin)


def make_kv(
    dims: Dims, requests: int, context: int, num_layers: int, dtype: torch.dtype = torch.bfloat16
) -> PagedKV:
    """A cache of random numbers in which `requests` requests hold `context` tokens."""
    kv = PagedKV(
        [dims.group] * num_layers, num_pages=requests * -(-context // 16) + 1, page_size=16,
        max_requests=requests, max_seq_len=context, dtype=dtype, device=DEVICE,
    )  # fmt: skip
    for cache in (*kv.k_cache, *kv.v_cache):
        cache.normal_()
    for _ in range(requests):
        assert kv.extend(kv.add_request(), context)
    kv.flush()
    return kv


def decode_batch(
    kv: PagedKV, rows: list[int], lens: list[int], vocab: int, device: torch.device = DEVICE
) -> ForwardBatch:
    slots = torch.from_numpy(kv.decode_slots(rows, [n - 1 for n in lens]))
    cpu_lens = torch.tensor(lens, dtype=torch.int32)
    ids = torch.randint(vocab, (len(rows),))
    batch = ForwardBatch(
        ForwardMode.DECODE, len(rows), ids, cpu_lens.long() - 1, torch.tensor(rows, dtype=torch.int32),
        cpu_lens, cpu_lens, sum(lens), slots,
    )  # fmt: skip
    return batch.to(device)


def triton_backend(dims: Dims, kv: PagedKV, max_bs: int) -> TritonAttentionBackend:
    options = {"max_batch_size": max_bs, "max_seq_len": kv.max_seq_len, "device": kv.device}
    return TritonAttentionBackend(
        [dims.group], kv, TorchAttentionBackend([dims.group], kv, **options), **options
    )


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.double().cpu(), want.double().cpu()
    return float((got - want).norm() / want.norm())


def bind(decoder: FusedDecoder, kv: PagedKV) -> None:
    """Give every layer its cache."""
    for index, layer in enumerate(decoder.layers):
        layer.attention.k_cache, layer.attention.v_cache = kv.k_cache[index], kv.v_cache[index]
        layer.attention.group_id = 0


def run_step(decoder: FusedDecoder, backend: Any, kv: PagedKV, batch: ForwardBatch) -> Any:
    """One decode step."""
    bind(decoder, kv)
    token_ids = torch.empty_like(batch.input_ids)
    with forward_context(backend, batch, token_ids, greedy=True):
        return decoder(batch.input_ids[None], batch.positions[None])
