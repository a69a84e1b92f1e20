"""The torch attention backend and the paged cache on CUDA: real graphs, pinned staging, no waiting."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runners.attention.base import AttentionGroup, AttentionLayer
from runners.attention.torch_backend import TorchAttentionBackend
from runners.batches import extend_batch
from runners.model_runner import ModelRunner, RunnerConfig
from runners.paged_kv import PagedKV
from tests.runners.test_families import CASES, PROMPTS
from tests.runners.test_torch_attention import dense_attention
from tests.runners.tiny_models import MAX_SEQ_LEN, decode_batch, paged_greedy, reference_greedy, tiny_model


def config(device: torch.device, **fields: object) -> RunnerConfig:
    defaults = {
        "device": str(device),
        "max_batch_size": 6,
        "max_seq_len": MAX_SEQ_LEN,
        "page_size": 4,
        "capture_sizes": (1, 2, 6),
        "attention_backend": "torch",
    }
    return RunnerConfig(**{**defaults, **fields})


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_through_cuda_graphs_equal_those_of_transformers(
    device: torch.device, name: str
) -> None:
    model_type, fields, _ = CASES[name]
    loaded = tiny_model(model_type, device=device, **fields)
    expected = reference_greedy(loaded.model, PROMPTS, num_tokens=24)
    with ModelRunner(loaded, config(device, poison_padding=True)) as runner:
        assert paged_greedy(runner, PROMPTS, num_tokens=24, chunk=5) == expected
        assert (runner.outcome.mode, runner.graph_backend) == ("graph", "cuda")


@pytest.mark.parametrize("num_tokens", [32, 33, 257])
def test_a_prefill_within_a_window_equals_dense_attention(device: torch.device, num_tokens: int) -> None:
    """torch's memory-efficient kernel is wrong at one token more than a multiple of 32 (pytorch#191937)."""
    group = AttentionGroup(16, 8, 128, sm_scale=128**-0.5, sliding_window=20)
    limits = {"max_seq_len": 272, "device": device}
    kv = PagedKV([group], num_pages=18, page_size=16, max_requests=1, dtype=torch.float32, **limits)
    backend = TorchAttentionBackend([group], kv, max_batch_size=1, **limits)
    row = kv.add_request()
    assert kv.extend(row, num_tokens)
    kv.flush()
    batch = extend_batch(kv, [row], [0], [np.zeros(num_tokens)]).to(device)
    q, k, v = (torch.randn(num_tokens, heads, 128, device=device) for heads in (16, 8, 8))
    backend.init_forward_metadata(batch)
    got = backend.forward_extend(q, k, v, AttentionLayer(0, kv.k_cache[0], kv.v_cache[0]), batch)
    expected = dense_attention(group, q.cpu(), k.cpu(), v.cpu())
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_fifty_replays_never_wait_for_the_device(device: torch.device) -> None:
    with ModelRunner(tiny_model(device=device, dtype="bfloat16"), config(device)) as runner:
        rows = [runner.kv.add_request() for _ in range(5)]
        batches = [decode_batch(runner, rows, np.full(5, 3 + step), [5] * 5) for step in range(50)]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for batch in batches:
                runner.forward(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert runner.graph_runner is not None
        assert {mode for mode, _ in runner.graph_runner.outcome_counts} == {"graph"}
