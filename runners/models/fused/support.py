"""Which models `model.implementation=fused` rewrites; decided from the config alone."""

from __future__ import annotations

from typing import Any

from runners.errors import UnsupportedModelError

#: Families whose decoder layer is the one that `layers` builds.
FUSED_FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


def check_fused(config: Any, source: str) -> None:
    """Raise UnsupportedModelError, with the reason, if the model of `config` cannot be rewritten.

    `config` is a transformers config; `source` says in the message where it came from.
    """
    reason = _refusal(config)
    if reason is not None:
        raise UnsupportedModelError(
            f"{source}: model.implementation=fused does not rewrite this model: {reason}. "
            "Use model.implementation=transformers."
        )


def _refusal(config: Any) -> str | None:
    if config.model_type not in FUSED_FAMILIES:
        return f"model type '{config.model_type}' is none of {', '.join(FUSED_FAMILIES)}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, and the kernels compute SiLU"
    if getattr(config, "mlp_bias", False):
        return "its gate and up projections have biases (mlp_bias=true)"
    parameters = getattr(config, "rope_parameters", None) or {}
    if float(parameters.get("partial_rotary_factor") or 1.0) != 1.0:
        return "its rotary embedding turns only a part of each head (partial_rotary_factor)"
    return None
