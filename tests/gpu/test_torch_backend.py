"""The torch attention backend and the paged cache on CUDA: real graphs, pinned staging, no waiting."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runners.model_runner import ModelRunner, RunnerConfig
from tests.runners.test_families import CASES, PROMPTS
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
