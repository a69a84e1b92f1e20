from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from runners.errors import UnsupportedModelError
from runners.model_runner import ModelRunner, RunnerConfig
from runners.models.fused.layers import FusedDecoder
from runners.models.fused.support import FUSED_FAMILIES
from runners.models.loader import LoadedModel, check_model, load_model
from tests.runners.tiny_models import (
    MAX_SEQ_LEN,
    decode_batch,
    extend_batch,
    paged_greedy,
    reference_greedy,
    tiny_spec,
)

#: Family and the fields that bring out what it adds to a plain decoder layer.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "llama 3 rotary scaling": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen2 with biases": ("qwen2", {}),
    "qwen3 with head norms": ("qwen3", {}),
    "qwen3 with a tied head": ("qwen3", {"tie_word_embeddings": True}),
    "mistral with a window": ("mistral", {"sliding_window": 7}),
    "one key head a query head": ("llama", {"num_key_value_heads": 4}),
}
PROMPTS = [[5, 9, 3], [7], list(range(20, 41)), [2, 2, 2, 2], list(range(90, 99))]


def both(name: str) -> tuple[LoadedModel, LoadedModel]:
    """The same random model twice: as transformers runs it, and fused. No norm or bias is trivial."""
    model_type, fields = CASES[name]
    spec = tiny_spec(model_type, **fields)
    plain = load_model(spec, "cpu")
    return plain, load_model(replace(spec, implementation="fused"), "cpu")


@pytest.fixture(autouse=True)
def uneven_norms_and_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random models come with norms of ones and biases of zeros, which any mistake would pass."""
    from runners.models import loader

    build = loader._random_model

    def uneven(*args: Any) -> Any:
        model = build(*args)
        generator = torch.Generator().manual_seed(4)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
            elif name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        return model

    monkeypatch.setattr(loader, "_random_model", uneven)


def config(**changes: Any) -> RunnerConfig:
    defaults: dict[str, Any] = {
        "device": "cpu", "max_batch_size": 6, "max_seq_len": MAX_SEQ_LEN, "page_size": 4,
        "capture_sizes": (1, 2, 6), "poison_padding": True,
    }  # fmt: skip
    return RunnerConfig(**{**defaults, **changes})


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_equal_those_of_transformers(name: str) -> None:
    plain, fused = both(name)
    expected = reference_greedy(plain.model, PROMPTS, num_tokens=12)
    assert len({token for line in expected for token in line}) > 8, "the reference repeats itself"
    with ModelRunner(fused, config()) as runner:
        assert paged_greedy(runner, PROMPTS, num_tokens=12, chunk=5) == expected
        assert runner.outcome is not None and runner.outcome.mode == "graph"


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name: str) -> None:
    plain, fused = both(name)
    tokens = list(range(3, 43))
    outs = []
    for loaded in (plain, fused):
        with ModelRunner(loaded, config(kind="eager", poison_padding=False)) as runner:
            row = runner.kv.add_request()
            chunks = [runner.forward(extend_batch(runner, row, i, tokens[i : i + 7])) for i in (0, 7, 14, 21)]
            steps = [
                runner.forward(decode_batch(runner, [row], np.array([n]), [tokens[n - 1]]))
                for n in range(29, 41)
            ]
            outs.append(torch.cat([step.next_token_logits for step in (*chunks, *steps)]))
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2 with biases", "qwen3 with a tied head"])
def test_the_sizes_are_those_of_the_model_and_not_of_two(name: str) -> None:
    plain, fused = both(name)
    assert isinstance(fused.model, FusedDecoder)
    assert fused.num_params == plain.num_params and fused.groups == plain.groups
    norms = sum(p.nbytes for n, p in plain.model.named_parameters() if n.endswith("layernorm.weight"))
    kept = fused.model.head.norm
    final_norm = 0 if kept is not None else plain.model.model.norm.weight.nbytes
    matrices = sum(p.nbytes for p in plain.model.parameters())
    assert fused.weight_bytes - fused.model.cos_sin.nbytes == matrices - norms - final_norm
    embedding = 0 if "tied" in name else fused.model.embedding.nbytes
    assert fused.decode_weight_bytes == matrices - norms - final_norm - embedding


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("gemma2", {}, "model type 'gemma2' is none of llama, qwen2, qwen3, mistral"),
        ("llama", {"hidden_act": "gelu"}, "its activation is gelu"),
        ("llama", {"mlp_bias": True}, "mlp_bias=true"),
    ],
)
def test_what_cannot_be_rewritten_is_refused_by_name_before_the_weights(
    model_type: str, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        check_model(replace(tiny_spec(model_type, **fields), implementation="fused"))
    assert "Use model.implementation=transformers" in str(caught.value)


def test_every_fused_family_is_tested() -> None:
    assert {model_type for model_type, _ in CASES.values()} == set(FUSED_FAMILIES)
