"""Small random models of each family, and greedy decoding through the paged runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from runners.forward_batch import ForwardBatch, ForwardMode
from runners.model_runner import ModelRunner
from runners.models.loader import LoadedModel, ModelSpec, load_model

MAX_SEQ_LEN = 64

_SHAPE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    # Large weights, so that greedy decoding does not fall into one token.
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def tiny_config(model_type: str = "qwen3", **fields: Any) -> dict[str, Any]:
    """Config of a four-layer decoder of `model_type`, with `fields` changed."""
    return {"model_type": model_type, **_SHAPE, **fields}


def tiny_spec(
    model_type: str = "qwen3", *, seed: int = 3, dtype: str = "float32", **fields: Any
) -> ModelSpec:
    config = tiny_config(model_type, **fields)
    return ModelSpec("random", dtype=dtype, seed=seed, max_seq_len=MAX_SEQ_LEN, config=config)


def tiny_model(
    model_type: str = "qwen3", *, device: torch.device | str = "cpu", **fields: Any
) -> LoadedModel:
    return load_model(tiny_spec(model_type, **fields), device)


def reference_greedy(model: Any, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy tokens by `transformers.generate`, one unpadded prompt at a time, with its own attention."""
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        return [
            model.generate(
                torch.tensor([prompt], device=model.device),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64, device=model.device),
                max_new_tokens=num_tokens,
                do_sample=False,
            )[0, len(prompt) :].tolist()
            for prompt in prompts
        ]
    finally:
        model.set_attn_implementation(ours)


def paged_greedy(
    runner: ModelRunner, prompts: Sequence[list[int]], num_tokens: int, chunk: int
) -> list[list[int]]:
    """Greedy tokens of all prompts, decoded as one batch, prefilled in chunks of `chunk` tokens."""
    rows = [runner.kv.add_request() for _ in prompts]
    tokens = [[_prefill(runner, row, prompt, chunk)] for row, prompt in zip(rows, prompts, strict=True)]
    lengths = np.array([len(prompt) for prompt in prompts])
    for _ in range(num_tokens - 1):
        lengths += 1
        batch = decode_batch(runner, rows, lengths, [line[-1] for line in tokens])
        for line, token in zip(
            tokens, runner.forward(batch).next_token_logits.argmax(-1).tolist(), strict=True
        ):
            line.append(token)
    for row in rows:
        runner.kv.release(row)
    return tokens


def _prefill(runner: ModelRunner, row: int, prompt: list[int], chunk: int) -> int:
    for start in range(0, len(prompt), chunk):
        logits = runner.forward(extend_batch(runner, row, start, prompt[start : start + chunk]))
    return int(logits.next_token_logits[0].argmax())


def extend_batch(runner: ModelRunner, row: int, start: int, token_ids: list[int]) -> ForwardBatch:
    end = start + len(token_ids)
    assert runner.kv.extend(row, end)
    seq_lens = torch.tensor([end], dtype=torch.int32)
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=torch.tensor(token_ids),
        positions=torch.arange(start, end),
        req_pool_indices=torch.tensor([row], dtype=torch.int32),
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens,
        seq_lens_sum=end,
        out_cache_loc=torch.from_numpy(runner.kv.slots(row, start, end)),
        extend_seq_lens_cpu=[len(token_ids)],
    )


def decode_batch(
    runner: ModelRunner, rows: list[int], lengths: np.ndarray, token_ids: list[int]
) -> ForwardBatch:
    for row, length in zip(rows, lengths, strict=True):
        assert runner.kv.extend(row, int(length))
    seq_lens = torch.from_numpy(lengths.astype(np.int32))
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=len(rows),
        input_ids=torch.tensor(token_ids),
        positions=torch.from_numpy(lengths - 1),
        req_pool_indices=torch.tensor(rows, dtype=torch.int32),
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens,
        seq_lens_sum=int(lengths.sum()),
        out_cache_loc=torch.from_numpy(runner.kv.decode_slots(rows, lengths - 1)),
    )
