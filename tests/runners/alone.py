"""What a request's steps must compute: each request by itself, eager, its pages extended ahead of each token."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import torch

from runners.batches import decode_batch, extend_batch
from runners.model_runner import ModelRunner
from runners.models.loader import load_model
from tests.runners.tiny_runner import tiny_config, tiny_spec

#: Tokens that are worked out of each request.
NUM_OUTPUTS = 14


def prompt_of(seed: int, request_id: int, prompt_len: int) -> np.ndarray:
    """The prompt that `ModelExecutor` makes up."""
    return np.random.default_rng((seed, request_id)).integers(0, 64, prompt_len)


@cache
def _runner() -> ModelRunner:
    # A model of its own: a model belongs to the runner that bound its cache last.
    config = tiny_config(kind="eager", capture_sizes=(), max_batch_size=1, page_size=16)
    return ModelRunner(load_model(tiny_spec(), "cpu"), config)


@cache
def alone(seed: int, request_id: int, prompt_len: int) -> tuple[list[int], torch.Tensor]:
    """Return the greedy tokens of a request and the logits that each was taken from, `[NUM_OUTPUTS, vocab]`."""
    runner, prompt = _runner(), prompt_of(seed, request_id, prompt_len)
    kv, row = runner.kv, runner.kv.add_request()
    assert kv.extend(row, prompt_len)
    logits = [runner.forward(extend_batch(kv, [row], [0], [prompt])).next_token_logits[0].clone()]
    tokens = [int(logits[0].argmax())]
    for length in range(prompt_len + 1, prompt_len + NUM_OUTPUTS):
        assert kv.extend(row, length)
        newest = np.array([tokens[-1]])
        batch = decode_batch(kv, np.array([row], np.int32), np.array([length], np.int32), newest)
        logits.append(runner.forward(replace(batch, host_rows=None)).next_token_logits[0].clone())
        tokens.append(int(logits[-1].argmax()))
    kv.release(row)
    return tokens, torch.stack(logits)
