"""Which decoder families run, and why the others do not. Decided from the config alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from runners.errors import UnsupportedModelError

#: `model_type` → what the family is called by people. Each is proven token for token in the tests.
SUPPORTED: dict[str, str] = {
    "llama": "Llama (SmolLM2 and other models of its shape included)",
    "qwen2": "Qwen2 and Qwen2.5",
    "qwen3": "Qwen3",
    "mistral": "Mistral",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3, text only",
    "phi3": "Phi-3 and Phi-4-mini",
}

_MOE = "a mixture of experts loops over the experts that the data picks, which a graph cannot record"
_MLA = "latent attention (MLA) caches a compressed latent, not keys and values a head"
_LINEAR = "linear and state-space layers keep a recurrent state, which the paged cache does not hold"
_SINKS = "attention sinks add a learned term to the softmax that the backends do not compute"
_ALIBI = "ALiBi adds a position bias to the scores that the backends do not compute"
_MROPE = "M-RoPE needs three position ids a token"
_ENCODER = "encoder-decoder models attend to an encoder's output"
_QUANTISED = "quantised weights are not run"
_MULTIMODAL = "it takes more than text"

#: Known types that are refused, so that the reason can be given by name.
REFUSED: dict[str, str] = {
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "granitemoe", "dbrx"), _MOE),
    **dict.fromkeys(("llama4", "llama4_text", "glm4_moe", "ernie4_5_moe", "minimax"), _MOE),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "minicpm3", "longcat_flash", "kimi_k2"), _MLA),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "xlstm"), _LINEAR),
    **dict.fromkeys(("jamba", "bamba", "zamba", "zamba2", "falcon_h1", "nemotron_h", "lfm2"), _LINEAR),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "granitemoehybrid", "kimi_linear"), _LINEAR),
    "gpt_oss": _SINKS,
    **dict.fromkeys(("bloom", "mpt", "falcon"), _ALIBI),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"), _MROPE),
    **dict.fromkeys(("t5", "mt5", "bart", "mbart", "whisper", "pegasus", "marian"), _ENCODER),
    "gemma3": f"{_MULTIMODAL}; its text model alone (model_type gemma3_text) does run",
    **dict.fromkeys(("gemma3n", "gemma4", "mistral3", "mllama", "llava", "paligemma"), _MULTIMODAL),
}

_Feature = Callable[[Any], bool]


def _has(*names: str) -> _Feature:
    return lambda config: any(getattr(config, name, None) for name in names)


def _has_recurrent_layers(config: Any) -> bool:
    known = {"full_attention", "sliding_attention"}
    return bool(set(getattr(config, "layer_types", None) or ()) - known)


def _has_mrope(config: Any) -> bool:
    return any("mrope_section" in parameters for parameters in rope_parameters(config))


#: Features that are refused whatever the type is called: a supported type may carry them too.
_FEATURES: list[tuple[_Feature, str]] = [
    (_has("is_encoder_decoder"), _ENCODER),
    (_has("quantization_config"), _QUANTISED),
    (_has("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"), _MOE),
    (_has("kv_lora_rank"), _MLA),
    (_has_recurrent_layers, _LINEAR),
    (_has("alibi"), _ALIBI),
    (_has_mrope, _MROPE),
    (_has("use_bidirectional_attention"), "its attention is not causal"),
    (_has("vision_config", "audio_config"), _MULTIMODAL),
]

#: Scalings that recompute their frequencies from the longest request of the batch.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def check_family(config: Any, source: str) -> None:
    """Raise UnsupportedModelError, with the reason, if the model of `config` does not run.

    `config` is a transformers config; `source` says in the message where it came from.
    """
    model_type = str(config.model_type)
    reason = REFUSED.get(model_type) or next((why for has, why in _FEATURES if has(config)), None)
    if reason is None and model_type in SUPPORTED:
        return
    raise UnsupportedModelError(refusal(model_type, source, reason))


def refusal(model_type: str, source: str, reason: str | None) -> str:
    """The message for a family that does not run."""
    why = reason or REFUSED.get(model_type) or "it is not in the list of families proven here"
    return f"{source}: model type '{model_type}' is not supported: {why}. Supported: {', '.join(SUPPORTED)}."


def check_positions(config: Any, max_seq_len: int, source: str) -> None:
    """Raise UnsupportedModelError if the rotary scaling is not the same for every batch.

    `dynamic` and `longrope` choose their frequencies by the longest request of the *batch*, so one
    request's tokens would depend on its neighbours. Below the length where they switch they are
    constant, and allowed.
    """
    for parameters in rope_parameters(config):
        kind = parameters.get("rope_type", "default")
        limit = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
        if kind in _LENGTH_DEPENDENT_ROPE and max_seq_len > limit:
            raise UnsupportedModelError(
                f"{source}: rotary scaling '{kind}' changes with the longest request of a batch beyond "
                f"{limit} tokens, and model.max_seq_len is {max_seq_len}. Set model.max_seq_len={limit} or less."
            )


def freeze_positions(model: nn.Module) -> None:
    """Keep rotary frequencies as built, for the scalings that `check_positions` let through.

    Their update reads the longest position of the batch in every step, on some versions from the
    host, and would never change anything below the length that was checked.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) in _LENGTH_DEPENDENT_ROPE:
            module.rope_type = "default"  # type: ignore[assignment]  # a plain str attribute


def rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The rotary parameters of a config: one set, or one a kind of layer (Gemma 3)."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]
