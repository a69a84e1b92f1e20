from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from runners.model_runner import ModelRunner, RunnerConfig
from runners.models.families import SUPPORTED
from tests.runners.tiny_models import (
    MAX_SEQ_LEN,
    decode_batch,
    extend_batch,
    paged_greedy,
    reference_greedy,
    tiny_model,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [4.0, 5.0, 6.0, 7.0],
    "original_max_position_embeddings": MAX_SEQ_LEN,
}
# Without a scaled query, Gemma's embeddings drown the attention of so small a model.
GEMMA = {"sliding_window": 6, "query_pre_attn_scalar": 1, "initializer_range": 0.12}

#: name → (model type, config fields, number of attention groups).
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("llama", {}, 1),
    "llama with llama3 rotary scaling and a tied head": (
        "llama",
        {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
        1,
    ),
    "llama with biases and one KV head a query head": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
        1,
    ),
    "llama with linear rotary scaling": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        1,
    ),
    "qwen2": ("qwen2", {}, 1),
    "qwen2 with a window on the upper layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
        2,
    ),
    "qwen3": ("qwen3", {}, 1),
    "qwen3 with one KV head, tied": ("qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": True}, 1),
    "mistral with a window": ("mistral", {"sliding_window": 6}, 1),
    "mistral without a window": ("mistral", {"sliding_window": None}, 1),
    "gemma2": (
        "gemma2",
        {**GEMMA, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 30.0},
        2,
    ),
    "gemma2 without caps": (
        "gemma2",
        {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
        2,
    ),
    "gemma3": (
        "gemma3_text",
        {**GEMMA, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
        2,
    ),
    "phi3": ("phi3", {"sliding_window": None}, 1),
    "phi3 with a window": ("phi3", {"sliding_window": 7}, 1),
    "phi3 with longrope below its switch": ("phi3", {"rope_parameters": LONG_ROPE}, 1),
    "phi3 with partial rotary": ("phi3", {"partial_rotary_factor": 0.5}, 1),
}

#: Shorter than a page, one token, across a page edge, longer than every window.
PROMPTS = [[5, 9, 3], [99], [11, 12, 13, 14, 15, 16, 17, 18, 19], list(range(20, 43))]


def test_every_supported_family_is_proven_here() -> None:
    assert {model_type for model_type, _, _ in CASES.values()} == set(SUPPORTED)


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_equal_those_of_transformers(name: str) -> None:
    model_type, fields, num_groups = CASES[name]
    loaded = tiny_model(model_type, **fields)
    assert len(loaded.groups) == num_groups
    expected = reference_greedy(loaded.model, PROMPTS, num_tokens=12)
    assert len({token for line in expected for token in line}) > 8, "the reference repeats itself"

    config = RunnerConfig(
        device="cpu",
        max_batch_size=6,
        max_seq_len=MAX_SEQ_LEN,
        page_size=4,
        capture_sizes=(1, 2, 6),
        poison_padding=True,
    )
    with ModelRunner(loaded, config) as runner:
        assert paged_greedy(runner, PROMPTS, num_tokens=12, chunk=5) == expected
        assert runner.outcome is not None and runner.outcome.mode == "graph"


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name: str) -> None:
    """Sharper than tokens: an argmax may survive a wrong scale or a window that is off by one."""
    model_type, fields, _ = CASES[name]
    loaded = tiny_model(model_type, **fields)
    tokens = list(range(3, 43))
    config = RunnerConfig(device="cpu", kind="eager", max_batch_size=2, max_seq_len=MAX_SEQ_LEN, page_size=4)
    with ModelRunner(loaded, config) as runner:
        row = runner.kv.add_request()
        chunks = [runner.forward(extend_batch(runner, row, i, tokens[i : i + 7])) for i in (0, 7, 14, 21)]
        lengths = [28 + 1 + i for i in range(12)]
        steps = [runner.forward(decode_batch(runner, [row], np.array([n]), [tokens[n - 1]])) for n in lengths]
    ours = torch.cat([step.next_token_logits for step in (*chunks, *steps)])
    loaded.model.set_attn_implementation("eager")
    with torch.no_grad():
        theirs = loaded.model(torch.tensor([tokens])).logits[0]
    expected = theirs[[6, 13, 20, 27, *(n - 1 for n in lengths)]]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
