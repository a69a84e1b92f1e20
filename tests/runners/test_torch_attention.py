from __future__ import annotations

import numpy as np
import pytest
import torch

from runners.attention import AttentionOptions, create_attention_backend, torch_backend
from runners.attention.base import AttentionBackend, AttentionGroup, AttentionLayer
from runners.errors import PlanLayoutError
from runners.forward_batch import ForwardBatch, ForwardMode
from runners.paged_kv import PADDING_ROW, PagedKV

PAGE_SIZE = 4
MAX_SEQ_LEN = 40
CPU = torch.device("cpu")


def group(kv_heads: int = 2, window: int | None = None, cap: float | None = None) -> AttentionGroup:
    return AttentionGroup(4, kv_heads, 8, sm_scale=0.3, sliding_window=window, logits_soft_cap=cap)


GROUPS = {
    "grouped-query": group(),
    "multi-head": group(kv_heads=4),
    "multi-query": group(kv_heads=1),
    "window": group(window=5),
    "window of one token": group(window=1),
    "soft cap": group(cap=1.5),
    "window and soft cap": group(window=6, cap=1.5),
}


class Sequences:
    """Random keys and values of a few requests, kept dense beside the paged cache under test."""

    def __init__(self, groups: list[AttentionGroup], max_requests: int = 4) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.groups = groups
        self.kv = PagedKV(
            groups,
            num_pages=max_requests * MAX_SEQ_LEN // PAGE_SIZE + 1,
            page_size=PAGE_SIZE,
            max_requests=max_requests,
            max_seq_len=MAX_SEQ_LEN,
            dtype=torch.float32,
            device="cpu",
        )
        options = AttentionOptions(max_batch_size=8, max_seq_len=MAX_SEQ_LEN, device=CPU)
        self.backend = create_attention_backend("torch", groups, self.kv, options)
        self.layers = [
            AttentionLayer(i, k, v)
            for i, (k, v) in enumerate(zip(self.kv.k_cache, self.kv.v_cache, strict=True))
        ]
        #: row → per layer (keys, values), each `[length, kv heads, head_dim]`.
        self.dense: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def add(self) -> int:
        row = self.kv.add_request()
        empty = [torch.empty(0, g.num_kv_heads, g.head_dim) for g in self.groups]
        self.dense[row] = [(tensor, tensor) for tensor in empty]
        return row

    def batch(self, mode: ForwardMode, rows: list[int], counts: list[int]) -> ForwardBatch:
        lengths = [int(self.kv.table.lengths[row]) for row in rows]
        ends = [length + count for length, count in zip(lengths, counts, strict=True)]
        for row, end in zip(rows, ends, strict=True):
            assert self.kv.extend(row, end)
        self.kv.flush()
        spans = list(zip(rows, lengths, ends, strict=True))
        seq_lens = torch.tensor(ends, dtype=torch.int32)
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows),
            input_ids=torch.zeros(sum(counts), dtype=torch.int64),
            positions=torch.cat([torch.arange(start, end) for _, start, end in spans]),
            req_pool_indices=torch.tensor(rows, dtype=torch.int32),
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            seq_lens_sum=sum(ends),
            out_cache_loc=torch.from_numpy(np.concatenate([self.kv.slots(*span) for span in spans])),
            extend_seq_lens_cpu=counts if mode.is_extend() else None,
        )

    def new_tokens(
        self, layer: int, rows: list[int], counts: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random q, k and v of the step; k and v join the dense copy."""
        g, total = self.groups[layer], sum(counts)
        q = self.random(total, g.num_qo_heads, g.head_dim)
        k, v = (self.random(total, g.num_kv_heads, g.head_dim) for _ in range(2))
        for row, new_k, new_v in zip(rows, k.split(counts), v.split(counts), strict=True):
            old_k, old_v = self.dense[row][layer]
            self.dense[row][layer] = (torch.cat([old_k, new_k]), torch.cat([old_v, new_v]))
        return q, k, v

    def expected(self, layer: int, rows: list[int], counts: list[int], q: torch.Tensor) -> torch.Tensor:
        parts = zip(rows, q.split(counts), strict=True)
        return torch.cat(
            [dense_attention(self.groups[layer], part, *self.dense[row][layer]) for row, part in parts]
        )

    def prefill(self, rows: list[int], counts: list[int]) -> None:
        """Run a prefill step on every layer and compare it with dense attention."""
        batch = self.batch(ForwardMode.EXTEND, rows, counts)
        self.backend.init_forward_metadata(batch)
        for i, layer in enumerate(self.layers):
            q, k, v = self.new_tokens(i, rows, counts)
            out = self.backend.forward_extend(q, k, v, layer, batch)
            torch.testing.assert_close(out, self.expected(i, rows, counts, q), rtol=1e-5, atol=1e-5)

    def decode(self, rows: list[int]) -> None:
        """Run a decode step on every layer and compare it with dense attention."""
        counts = [1] * len(rows)
        batch = self.batch(ForwardMode.DECODE, rows, counts)
        self.backend.init_forward_metadata(batch)
        for i, layer in enumerate(self.layers):
            q, k, v = self.new_tokens(i, rows, counts)
            out = self.backend.forward_decode(q, k, v, layer, batch)
            torch.testing.assert_close(out, self.expected(i, rows, counts, q), rtol=1e-5, atol=1e-5)


def dense_attention(g: AttentionGroup, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last `len(q)` tokens of one request, written out in float64."""
    repeats = g.num_qo_heads // g.num_kv_heads
    keys, values = (x.double().repeat_interleave(repeats, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.double(), keys) * g.sm_scale
    if g.logits_soft_cap is not None:
        scores = torch.tanh(scores / g.logits_soft_cap) * g.logits_soft_cap
    q_pos = torch.arange(len(k) - len(q), len(k))[:, None]
    distance = q_pos - torch.arange(len(k))[None, :]
    hidden = (distance < 0) | (distance >= (g.sliding_window or len(k) + 1))
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, values).float()


@pytest.mark.parametrize("name", GROUPS)
def test_ragged_prefill_in_chunks_then_decode_equals_dense_attention(name: str) -> None:
    sequences = Sequences([GROUPS[name]])
    a, b, c = (sequences.add() for _ in range(3))
    sequences.prefill([a, b, c], [1, 7, 4])  # below, across and at a page edge
    sequences.prefill([b, c], [9, 3])  # chunks over a cached prefix
    for _ in range(6):
        sequences.decode([a, b, c])
    sequences.prefill([a], [5])
    sequences.decode([c, a])


@pytest.mark.parametrize("name", ["soft cap", "window and soft cap"])
def test_scores_made_a_few_rows_at_a_time_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "_PLAIN_ROWS", 4)
    sequences = Sequences([GROUPS[name]])
    rows = [sequences.add(), sequences.add()]
    sequences.prefill(rows, [13, 4])
    sequences.prefill(rows, [3, 9])
    sequences.decode(rows)


def test_layers_of_unlike_groups_share_a_step() -> None:
    sequences = Sequences([GROUPS["grouped-query"], GROUPS["window"], GROUPS["soft cap"]])
    rows = [sequences.add(), sequences.add()]
    sequences.prefill(rows, [11, 3])
    for _ in range(4):
        sequences.decode(rows)


@pytest.mark.parametrize("name", GROUPS)
def test_nan_past_the_end_never_reaches_a_row(name: str) -> None:
    sequences = Sequences([GROUPS[name]])
    rows = [sequences.add(), sequences.add(), sequences.add()]
    sequences.kv.poison_unallocated()
    sequences.prefill(rows, [6, 1, 15])
    for _ in range(5):
        sequences.kv.poison_unallocated()
        sequences.kv.poison_tails()
        sequences.decode(rows)
    sequences.kv.check_null_page()


def padded_replay(sequences: Sequences, rows: list[int], size: int) -> torch.Tensor:
    """Replay a decode step padded to `size`, as the graph runner does; return the real rows."""
    backend, counts = sequences.backend, [1] * len(rows)
    batch = sequences.batch(ForwardMode.DECODE, rows, counts)
    num_padding = size - len(rows)
    fill = backend.get_cuda_graph_seq_len_fill_value()
    req = torch.cat([batch.req_pool_indices, torch.full((num_padding,), PADDING_ROW, dtype=torch.int32)])
    lens = torch.cat([batch.seq_lens, torch.full((num_padding,), fill, dtype=torch.int32)])
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, torch.zeros(num_padding, dtype=torch.int64)])
    backend.init_forward_metadata_replay_cuda_graph(
        size, req, lens, int(lens.sum()), ForwardMode.DECODE, lens
    )
    q, k, v = sequences.new_tokens(0, rows, counts)
    padded = [torch.cat([x, torch.ones(num_padding, *x.shape[1:])]) for x in (q, k, v)]
    out = backend.forward_decode(padded[0], padded[1], padded[2], sequences.layers[0], batch)
    assert out.isfinite().all()
    expected = sequences.expected(0, rows, counts, q)
    torch.testing.assert_close(out[: len(rows)], expected, rtol=1e-5, atol=1e-5)
    return out


def graph_sequences(g: AttentionGroup) -> Sequences:
    sequences = Sequences([g])
    sequences.backend.init_cuda_graph_state(8, 8)
    return sequences


@pytest.mark.parametrize("name", GROUPS)
def test_a_padded_replay_leaves_real_rows_alone_and_padding_rows_finite(name: str) -> None:
    sequences = graph_sequences(GROUPS[name])
    rows = [sequences.add(), sequences.add(), sequences.add()]
    sequences.prefill(rows, [4, 13, 2])
    for _ in range(3):
        sequences.kv.poison_tails()
        padded_replay(sequences, rows, size=8)
    padded_replay(sequences, rows[:1], size=2)
    sequences.kv.check_null_page()


def test_every_replay_plans_into_the_same_memory() -> None:
    sequences = graph_sequences(GROUPS["window"])
    before = {name: tensor.data_ptr() for name, tensor in sequences.backend.captured_tensors().items()}
    rows = [sequences.add(), sequences.add()]
    sequences.prefill(rows, [9, 2])
    padded_replay(sequences, rows, size=4)
    padded_replay(sequences, rows[1:], size=1)
    plans = sequences.backend._decode_plans  # type: ignore[attr-defined]
    assert plans[0].slots.data_ptr() == before["attention.slots.0"]
    assert before == {n: t.data_ptr() for n, t in sequences.backend.captured_tensors().items()}


def test_a_row_longer_than_the_captured_table_is_refused() -> None:
    backend: AttentionBackend = graph_sequences(GROUPS["grouped-query"]).backend
    lens = torch.tensor([MAX_SEQ_LEN + 1], dtype=torch.int32)
    req = torch.tensor([1], dtype=torch.int32)
    with pytest.raises(PlanLayoutError, match=r"model\.max_seq_len"):
        backend.init_forward_metadata_replay_cuda_graph(
            1, req, lens, MAX_SEQ_LEN + 1, ForwardMode.DECODE, lens
        )


def test_a_negative_slot_is_refused_and_never_wraps_round() -> None:
    sequences = Sequences([GROUPS["grouped-query"]])
    row = sequences.add()
    batch = sequences.batch(ForwardMode.DECODE, [row], [1])
    batch.out_cache_loc = torch.tensor([-1])
    sequences.backend.init_forward_metadata(batch)
    q, k, v = sequences.new_tokens(0, [row], [1])
    with pytest.raises(IndexError):
        sequences.backend.forward_decode(q, k, v, sequences.layers[0], batch)
    assert (sequences.kv.k_cache[0] == 0).all()


def test_a_half_precision_cache_serves_a_float32_model() -> None:
    g = GROUPS["grouped-query"]
    sequences = Sequences([g])
    sequences.layers = [
        AttentionLayer(0, *(cache.half() for cache in (sequences.kv.k_cache[0], sequences.kv.v_cache[0])))
    ]
    row = sequences.add()
    batch = sequences.batch(ForwardMode.EXTEND, [row], [6])
    sequences.backend.init_forward_metadata(batch)
    q, k, v = sequences.new_tokens(0, [row], [6])
    out = sequences.backend.forward_extend(q, k, v, sequences.layers[0], batch)
    torch.testing.assert_close(out, sequences.expected(0, [row], [6], q), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("flashinfer", "cpu", "needs a CUDA device"),
        ("flashattention", "cpu", "choose one of auto, torch, flashinfer"),
    ],
)
def test_a_backend_that_cannot_run_here_is_refused_by_name(name: str, device: str, message: str) -> None:
    sequences = Sequences([GROUPS["grouped-query"]])
    with pytest.raises(ValueError, match=message):
        options = AttentionOptions(1, MAX_SEQ_LEN, torch.device(device))
        create_attention_backend(name, sequences.groups, sequences.kv, options)
