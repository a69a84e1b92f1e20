"""A real runner on a decoder so small that a step takes a millisecond, and requests to decode on it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from runners.batches import decode_batch, extend_batch
from runners.cuda_graph_runner import CudaGraphRunner
from runners.forward_batch import ForwardBatch
from runners.model_runner import ModelRunner, RunnerConfig
from runners.models.loader import LoadedModel, ModelSpec, load_model
from runners.padding import StepPlan

MAX_SEQ_LEN = 48
PAGE_SIZE = 4
EAGER = StepPlan("eager")
CONFIG: dict[str, object] = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,  # large, so that a wrong plan shows in the logits
}


def tiny_model(device: str = "cpu") -> LoadedModel:
    """Two layers, grouped-query attention, float32, random weights; loaded once a device."""
    return _load(device if torch.cuda.is_available() else "cpu")


def tiny_spec() -> ModelSpec:
    return ModelSpec(source="random", dtype="float32", seed=1, max_seq_len=MAX_SEQ_LEN, config=CONFIG)


@cache
def _load(device: str) -> LoadedModel:
    return load_model(tiny_spec(), device)


def tiny_config(**overrides: Any) -> RunnerConfig:
    defaults: dict[str, Any] = {
        "device": "cpu",
        "max_batch_size": 8,
        "max_seq_len": MAX_SEQ_LEN,
        "page_size": PAGE_SIZE,
        "capture_sizes": (1, 2, 4, 8),
        "num_warmup_steps": 1,
    }
    return RunnerConfig(**{**defaults, **overrides})


def tiny_runner(**overrides: Any) -> ModelRunner:
    return ModelRunner(tiny_model(overrides.get("device", "cpu")), tiny_config(**overrides))


def graphs_of(runner: ModelRunner) -> CudaGraphRunner:
    assert runner.graph_runner is not None
    return runner.graph_runner


def logits(runner: ModelRunner, batch: ForwardBatch, plan: StepPlan | None = None) -> torch.Tensor:
    return runner.forward(batch, plan).next_token_logits.clone()


def assert_same_tokens(values: torch.Tensor, reference: torch.Tensor) -> None:
    """Contract 3b: within a tolerance, and the same top-1 where the top-2 gap is clear."""
    error = (values - reference).abs().max().item()
    assert error < 1e-5
    top2 = reference.topk(2).values
    clear = top2[:, 0] - top2[:, 1] > 4 * error
    assert torch.equal(values.argmax(-1)[clear], reference.argmax(-1)[clear])


class Requests:
    """Requests of the given lengths, prefilled but for the last token, which each decode step runs.

    The lengths default to unlike ones around page edges, so that a wrong plan or a wrong page shows.
    """

    def __init__(self, runner: ModelRunner, lengths: Sequence[int] = (), seed: int = 0) -> None:
        self.runner, self.kv = runner, runner.kv
        lengths = lengths or [5, 4, 17, 1, 8, 9, 3, 12, 2, 16, 13, 7][: runner.config.max_batch_size]
        self.lengths = np.array(lengths, dtype=np.int32)
        generator = np.random.default_rng(seed)
        self.prompts = [generator.integers(0, runner.vocab_size, n) for n in lengths]
        self.rows = np.array([self.kv.add_request() for _ in lengths], dtype=np.int32)
        for row, n in zip(self.rows.tolist(), lengths, strict=True):
            assert self.kv.extend(row, n)
            if n > 1:
                runner.forward(self.prefill(row, 0, n - 1))

    def prefill(self, row: int, start: int, end: int) -> ForwardBatch:
        """The prefill step of the tokens `[start, end)` of the request in `row`."""
        prompt = self.prompts[self.rows.tolist().index(row)]
        return extend_batch(self.kv, [row], [start], [prompt[start:end]])

    def batch(self, *which: int) -> ForwardBatch:
        """The decode step of the requests `which`; all of them if none is named."""
        index = list(which) or list(range(len(self.rows)))
        last = np.array([self.prompts[i][-1] for i in index], dtype=np.int64)
        return decode_batch(self.kv, self.rows[index], self.lengths[index], last)

    def first(self, n: int) -> ForwardBatch:
        """The decode step of the first `n` requests."""
        return self.batch(*range(n)) if n else ForwardBatch.idle()

    def release(self) -> None:
        for row in self.rows.tolist():
            self.kv.release(row)
