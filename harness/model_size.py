"""Bytes of a dense decoder, by arithmetic from its configuration: no weight is read, and no torch imported."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.schema import Config, ModelConfig

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
#: Types of model with gated MLPs and no experts, the ones that run here; those that tie embeddings by default.
_DENSE = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3_text")
_TIED = ("gemma2", "gemma3_text")


@dataclass(frozen=True)
class ModelSize:
    """What a model and its cache take; None where its configuration does not tell."""

    weight_bytes: int | None
    kv_bytes_per_token: int | None
    vocab_size: int | None
    item_bytes: int | None


def model_size(config: Config) -> ModelSize:
    """Return the sizes of `config.model`, of the files on disk where there are any. Good to about a percent."""
    shape = _shape(config.model)
    dtype = config.model.dtype
    if dtype == "auto":
        declared = str(shape.get("dtype") or shape.get("torch_dtype") or "").removeprefix("torch.")
        dtype = "float32" if config.model.source == "random" else declared
    item_bytes = _ITEM_BYTES.get(dtype)
    num_params = _num_params(shape)
    kv_dtype = config.attention.kv_cache_dtype
    kv_item_bytes = item_bytes if kv_dtype == "auto" else _ITEM_BYTES[kv_dtype]
    kv_values = None if num_params is None else 2 * shape["num_hidden_layers"] * _kv_width(shape)
    return ModelSize(
        weight_bytes=_product(num_params, item_bytes),
        kv_bytes_per_token=_product(kv_values, kv_item_bytes),
        vocab_size=shape.get("vocab_size"),
        item_bytes=item_bytes,
    )


def _product(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else left * right


def _shape(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of the Hugging Face config; empty for one that is not on this machine."""
    if model.source == "random":
        return dict(model.config)
    path = Path(model.path or "").expanduser() / "config.json"
    if model.source != "pretrained" or not path.is_file():
        return {}
    try:
        shape: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError:
        return {}
    return shape


def _kv_width(shape: dict[str, Any]) -> int:
    heads = shape["num_attention_heads"]
    head_dim = shape.get("head_dim") or shape["hidden_size"] // heads
    return int((shape.get("num_key_value_heads") or heads) * head_dim)


def _num_params(shape: dict[str, Any]) -> int | None:
    """Embeddings, projections and gated MLPs; the norms' and biases' vectors are below a thousandth."""
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if shape.get("model_type") not in _DENSE or not all(isinstance(shape.get(key), int) for key in needed):
        return None
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    head_dim = shape.get("head_dim") or hidden // heads
    attention = 2 * hidden * heads * head_dim + 2 * hidden * _kv_width(shape)
    layer = attention + 3 * hidden * shape["intermediate_size"] + 2 * hidden
    is_tied = shape.get("tie_word_embeddings", shape["model_type"] in _TIED)
    return int((1 if is_tied else 2) * shape["vocab_size"] * hidden + shape["num_hidden_layers"] * layer)
