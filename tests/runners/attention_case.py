"""Our decode attention by one tile against float32, on requests of unlike lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from runners.attention.base import AttentionGroup, AttentionLayer
from runners.attention.fragment_attention import FragmentAttentionTile
from runners.attention.torch_backend import TorchAttentionBackend
from runners.attention.triton_backend import AttentionTile, TritonAttentionBackend
from runners.forward_batch import ForwardBatch, ForwardMode
from runners.models.fused.qk_rope_cache import HeadInputs, QkvLayout, split_heads
from runners.paged_kv import NULL_PAGE, PagedKV

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
#: Triton's interpreter multiplies no bfloat16.
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
LENGTHS = (1, 2, 16, 17, 63, 64, 65, 129, 512, 777, 2048)
#: Relative error of one request's heads: bfloat16 rounds the query, the probabilities and the output.
_MAX_ERROR = 0.012


@dataclass(frozen=True)
class Shape:
    """Heads, pages and options of one attention."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    fused: bool = True
    has_norm: bool = True
    dtype: torch.dtype = DTYPE


Tile = AttentionTile | FragmentAttentionTile


def check_tile(shape: Shape, tile: Tile, both: bool, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    """Worst error of outputs and cache writes, and `bad`: what is wrong, or an empty string."""
    torch.manual_seed(1)
    case = AttentionCase(shape, lengths)
    # With NaN where no token is: masked values must not reach the result.
    want, new_k, new_v = case.reference()
    outs = []
    for pdl in (True, True, False) if both else (True, True):
        case.poison()
        outs.append(case.run(tile, pdl and DEVICE.type == "cuda"))
    error = max(_relative(got, exact) for got, exact in zip(outs[0].float(), want, strict=True))
    written = max(
        _relative(got.float(), exact) for got, exact in zip(case.written(), (new_k, new_v), strict=True)
    )
    wrong = []
    if not error < _MAX_ERROR:
        wrong.append(f"error {error:.4f}")
    if not written < _MAX_ERROR:
        wrong.append(f"cache {written:.4f}")
    if not all(torch.equal(outs[0], out) for out in outs[1:]):
        wrong.append("bits differ")
    if int(case.backend.captured_tensors()["attention.counters"].abs().sum()):
        wrong.append("counters left")
    return {"error": error, "cache_error": written, "bad": ", ".join(wrong)}


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    difference = float((got - want).norm() / want.norm().clamp_min(1e-9))
    return difference if difference == difference else 9.0


class AttentionCase:
    """A request of each length, whose last token is the step's."""

    def __init__(self, shape: Shape, lengths: tuple[int, ...]) -> None:
        self.shape, self.lengths, dtype = shape, list(lengths), shape.dtype
        bs, longest = len(lengths), max(lengths)
        group = AttentionGroup(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5, shape.window,
                               shape.soft_cap)  # fmt: skip
        pages = sum(-(-n // shape.page_size) for n in lengths) + 1
        self.kv = PagedKV([group], num_pages=pages, page_size=shape.page_size, max_requests=bs, max_seq_len=longest,
                          dtype=dtype, device=DEVICE)  # fmt: skip
        rows = []
        for n in lengths:
            rows.append(self.kv.add_request())
            assert self.kv.extend(rows[-1], n)
        self.kv.flush()
        self.batch = self._decode_step(rows)
        if shape.fused:
            self._forget_opened_pages(rows)
        for cache in (self.kv.k_cache[0], self.kv.v_cache[0]):
            cache.normal_()
        options: dict[str, Any] = {"max_batch_size": bs, "max_seq_len": longest, "device": DEVICE}
        prefill = TorchAttentionBackend([group], self.kv, **options)
        self.backend = TritonAttentionBackend([group], self.kv, prefill, **options)
        layout = QkvLayout(shape.heads, shape.kv_heads, shape.head_dim, 1e-6)
        half = shape.head_dim // 2
        angles = torch.arange(longest, device=DEVICE)[:, None] * 1e4 ** -torch.linspace(
            0, 1, half, device=DEVICE
        )
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        q_norm, k_norm = (torch.rand(shape.head_dim, device=DEVICE).to(dtype) + 0.5 for _ in range(2))
        norms = (q_norm, k_norm) if shape.has_norm else (None, None)
        self.inputs = HeadInputs(layout, *norms, cos_sin, self.batch.positions)
        self.qkv = torch.randn(bs, layout.num_heads * shape.head_dim, device=DEVICE).to(dtype)
        self.layer = AttentionLayer(0, self.kv.k_cache[0], self.kv.v_cache[0])

    def _forget_opened_pages(self, rows: list[int]) -> None:
        """Take the pages that the new tokens open out of the device's table: they reach it after such a step."""
        for row, n in zip(rows, self.lengths, strict=True):
            if (n - 1) % self.shape.page_size == 0:
                self.kv.page_table[row, (n - 1) // self.shape.page_size] = NULL_PAGE

    def _decode_step(self, rows: list[int]) -> ForwardBatch:
        lens = torch.tensor(self.lengths, dtype=torch.int32)
        slots = torch.from_numpy(self.kv.decode_slots(rows, [n - 1 for n in self.lengths]))
        return ForwardBatch(
            ForwardMode.DECODE, len(rows), torch.zeros(len(rows), dtype=torch.int64), lens.long() - 1,
            torch.tensor(rows, dtype=torch.int32), lens, lens, sum(self.lengths), slots,
        ).to(DEVICE)  # fmt: skip

    def reference(self) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Outputs `[heads, head_dim]` of each request and the new keys and values, in float32."""
        shape, outs = self.shape, []
        q, new_k, new_v = split_heads(self.qkv.float(), self.inputs)
        for i, n in enumerate(self.lengths):
            count = -(-n // shape.page_size)
            pages = self.kv.page_table[int(self.batch.req_pool_indices[i]), :count].long()
            k, v = (
                cache[pages].flatten(0, 1)[:n].float() for cache in (self.layer.k_cache, self.layer.v_cache)
            )
            k[-1], v[-1] = new_k[i], new_v[i]
            if shape.window:
                k, v = k[-shape.window :], v[-shape.window :]
            k, v = (x.repeat_interleave(shape.heads // shape.kv_heads, dim=1) for x in (k, v))
            scores = torch.einsum("hd,thd->ht", q[i], k) * shape.head_dim**-0.5
            if shape.soft_cap:
                scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
            outs.append(torch.einsum("ht,thd->hd", scores.softmax(-1), v))
        return outs, new_k, new_v

    def poison(self) -> None:
        """NaN in every slot that holds no token, and where the new one goes."""
        for cache in (self.layer.k_cache, self.layer.v_cache):
            flat = cache.flatten(0, 1)
            used = torch.zeros(flat.shape[0], dtype=torch.bool, device=DEVICE)
            for i, n in enumerate(self.lengths):
                token = torch.arange(n - 1, device=DEVICE)
                pages = self.kv.page_table[int(self.batch.req_pool_indices[i])].long()
                used[
                    pages[token // self.shape.page_size] * self.shape.page_size + token % self.shape.page_size
                ] = True
            flat[~used] = float("nan")

    def run(self, tile: Tile, pdl: bool) -> torch.Tensor:
        """`[bs, heads, head_dim]`; from rotated heads where the shape is not fused."""
        self.backend.tiles[len(self.lengths)] = tile
        self.backend.pdl = pdl
        if self.shape.fused:
            return self.backend.attend_fused(self.qkv, self.inputs, self.layer, self.batch)
        q, k, v = split_heads(self.qkv, self.inputs)
        return self.backend.forward_decode(q, k, v, self.layer, self.batch)

    def written(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values at the slots of the new tokens."""
        slots = self.batch.out_cache_loc
        return self.layer.k_cache.flatten(0, 1)[slots], self.layer.v_cache.flatten(0, 1)[slots]
