"""Load a decoder and make it ready for the runner: attention routed, groups known, sizes counted."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from runners.attention.base import AttentionGroup
from runners.errors import UnsupportedModelError
from runners.models.families import SUPPORTED, check_family, check_positions, freeze_positions, refusal
from runners.models.fused.support import check_fused
from runners.models.packed_linear import pack_linears
from runners.models.sources import Checkpoint, ModelSourceError, find_checkpoint, gguf_errors, read_config
from runners.models.weights import (
    count_parameters,
    fingerprint,
    parse_dtype,
    unread_embedding_bytes,
    weight_bytes,
)
from runners.paged_kv import PagedKV

#: Called with the name of each stage of a load as it begins, in this order.
LOAD_STAGES = ("config", "weights", "attention")
Progress = Callable[[str], None]

#: Keys that transformers reads beside the fields that a config class declares.
_EXTRA_CONFIG_KEYS = {"rope_theta", "rope_scaling", "partial_rotary_factor", "head_dim"}
_DIMENSIONS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip


@dataclass(frozen=True)
class ModelSpec:
    """What to load, in the words of the `model` part of a configuration."""

    #: `random`: `config` with weights from `seed`; `pretrained`: a folder or hub id; `gguf`: a file.
    source: str
    path: str | None = None
    revision: str | None = None
    #: `auto` (the checkpoint's own, float32 for random), `float32`, `bfloat16` or `float16`.
    dtype: str = "auto"
    seed: int = 0
    #: Longest request that the runner will see.
    max_seq_len: int = 2048
    #: For `random`: fields of the transformers config, `model_type` among them.
    config: dict[str, object] = field(default_factory=dict)
    #: `transformers`, or `fused`: the loaded layers rewritten for few kernels a step.
    implementation: str = "transformers"


@dataclass
class LoadedModel:
    """A model on its device, with what the runner and the record need to know of it."""

    model: nn.Module
    #: The transformers config.
    hf_config: Any
    #: Per layer: index into `groups`.
    layers: list[int]
    groups: list[AttentionGroup]
    #: Per layer: the module that attends, which receives `k_cache`, `v_cache` and `group_id`.
    attention_modules: list[nn.Module]
    vocab_size: int
    hidden_size: int
    #: Parameters, tied ones once.
    num_params: int
    #: Bytes of the weights' storage, shared storage once.
    weight_bytes: int
    #: Bytes of it that every decode step reads: an untied input embedding is left out.
    decode_weight_bytes: int
    dtype: torch.dtype
    #: `model.source`.
    source: str
    #: Commit of the hub repository, or None.
    revision: str | None
    #: SHA-256 of local weight files, or None (random weights, or a commit says it all).
    fingerprint: str | None
    max_position_embeddings: int
    #: `model.implementation`.
    implementation: str = "transformers"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def layer_groups(self) -> list[AttentionGroup]:
        """The group of each layer, as `PagedKV` takes them."""
        return [self.groups[group_id] for group_id in self.layers]


def check_model(spec: ModelSpec) -> Any:
    """Return the transformers config of `spec`, before any weight is read.

    Raises UnsupportedModelError for a family that does not run, ModelSourceError (a ValueError) for
    a model that is missing, incomplete, pickled or not as long as `max_seq_len`.
    """
    return _check(spec)[0]


def pin_model(spec: ModelSpec) -> ModelSpec:
    """Check as `check_model` does; return `spec` with the revision of a hub id resolved to its commit.

    What is loaded, hashed and recorded from there on is that commit, whatever is pushed meanwhile.
    """
    _, checkpoint = _check(spec)
    return spec if checkpoint is None else replace(spec, revision=checkpoint.revision)


def load_model(spec: ModelSpec, device: torch.device | str, progress: Progress | None = None) -> LoadedModel:
    """Check and load the model of `spec` onto `device`; raises as `check_model` does."""
    device = torch.device(device)
    report = progress or (lambda stage: None)
    report("config")
    hf_config, checkpoint = _check(spec)
    dtype = parse_dtype(spec.dtype, hf_config.dtype or torch.float32)
    report("weights")
    with torch.no_grad():
        if checkpoint is None:
            model = _random_model(hf_config, dtype, device, spec.seed)
        else:
            model = _pretrained_model(checkpoint, hf_config, dtype).to(device)
        model.eval().requires_grad_(False)
        freeze_positions(model)
        report("attention")
        loaded = _describe(spec, model, hf_config, dtype, checkpoint)
        del model
        if spec.implementation == "fused":
            _fuse(loaded, spec.max_seq_len)
        elif device.type == "cpu":
            loaded.weight_bytes += pack_linears(loaded.model)
        return loaded


def bind_kv(loaded: LoadedModel, kv: PagedKV) -> None:
    """Give each attention layer its part of the cache. Again after `kv.resize`."""
    for layer, module in enumerate(loaded.attention_modules):
        # Buffers, so that torch.compile lifts them to inputs; not persistent: they are no weights.
        module.register_buffer("k_cache", kv.k_cache[layer], persistent=False)
        module.register_buffer("v_cache", kv.v_cache[layer], persistent=False)
        module.group_id = loaded.layers[layer]  # type: ignore[assignment]  # a plain int attribute


# --- checking ----------------------------------------------------------------------------------


def _check(spec: ModelSpec) -> tuple[Any, Checkpoint | None]:
    if spec.implementation not in ("transformers", "fused"):
        raise ModelSourceError(
            "model.implementation", spec.implementation, "unknown.", "Use transformers or fused."
        )
    if spec.source == "random":
        hf_config, checkpoint, name = (_random_config(dict(spec.config)), None, "model.config")
    elif spec.source in ("pretrained", "gguf"):
        checkpoint = find_checkpoint(spec.source, spec.path, spec.revision)
        hf_config, name = _checkpoint_config(checkpoint, str(spec.path)), str(spec.path)
    else:
        raise ModelSourceError("model.source", spec.source, "unknown.", "Use random, pretrained or gguf.")
    check_family(hf_config, name)
    if spec.implementation == "fused":
        check_fused(hf_config, name)
    _check_length(hf_config, spec.max_seq_len, name)
    return hf_config, checkpoint


def _random_config(fields: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    model_type = str(fields.pop("model_type", ""))
    if not model_type:
        raise ModelSourceError(
            "model.config.model_type", None, "is missing.", f"Choose one of {', '.join(SUPPORTED)}."
        )
    if model_type not in SUPPORTED:
        raise UnsupportedModelError(refusal(model_type, "model.config", None))
    config_class = CONFIG_MAPPING[model_type]
    known = set(config_class().to_dict()) | set(config_class.attribute_map) | _EXTRA_CONFIG_KEYS
    for key in sorted(set(fields) - known):
        raise ModelSourceError(
            f"model.config.{key}",
            fields[key],
            f"{config_class.__name__} has no such field.",
            "Check its spelling.",
        )
    try:
        config = config_class(**fields)
    except Exception as error:  # transformers raises a class of its own for each kind of bad field
        raise ModelSourceError("model.config", model_type, _one_line(error), "Correct the field.") from error
    _check_dimensions(config)
    _check_heads(config)
    _check_builds(config)
    return config


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) + "."


def _check_dimensions(config: Any) -> None:
    for key in _DIMENSIONS:
        size = getattr(config, key, None)
        if size is not None and size < 1:
            raise ModelSourceError(f"model.config.{key}", size, "is below 1.", "Set it to 1 or more.")


def _check_builds(config: Any) -> None:
    """Build the modules without storage: what does not fit together is said before any weight is made."""
    from transformers import AutoModelForCausalLM

    auto_model: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"):
            auto_model.from_config(config)
    except Exception as error:  # whatever a module's constructor trips over
        reason = f"no model can be built of it: {type(error).__name__}: {_one_line(error)}"
        raise ModelSourceError("model.config", config.model_type, reason, "Correct the field.") from error


def _check_heads(config: Any) -> None:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise ModelSourceError(
            "model.config.num_key_value_heads",
            kv_heads,
            f"does not divide num_attention_heads={heads}.",
            "Choose a divisor.",
        )


def _checkpoint_config(checkpoint: Checkpoint, name: str) -> Any:
    from transformers import AutoConfig

    raw = read_config(checkpoint)
    model_type = str(raw["model_type"])
    # By name first: transformers cannot parse a type that it does not know.
    if model_type not in SUPPORTED:
        raise UnsupportedModelError(refusal(model_type, name, None))
    return AutoConfig.from_pretrained(
        checkpoint.location,
        revision=checkpoint.revision or "main",
        trust_remote_code=False,
        **_gguf_arguments(checkpoint),
    )


def _gguf_arguments(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"gguf_file": checkpoint.gguf_file} if checkpoint.gguf_file else {}


def _check_length(config: Any, max_seq_len: int, name: str) -> None:
    limit = config.max_position_embeddings
    if max_seq_len > limit:
        raise ModelSourceError(
            "model.max_seq_len", max_seq_len, f"{name} has {limit} positions.", f"Set it to {limit} or less."
        )
    check_positions(config, max_seq_len, name)


# --- loading -----------------------------------------------------------------------------------


def _random_model(hf_config: Any, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    from transformers import AutoModelForCausalLM

    auto_model: Any = AutoModelForCausalLM
    # On the device itself: a large model would take minutes to fill on the host.
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(seed)
        return auto_model.from_config(hf_config, dtype=dtype)


def _pretrained_model(checkpoint: Checkpoint, hf_config: Any, dtype: torch.dtype) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, GgufConfig

    auto_model: Any = AutoModelForCausalLM
    arguments = _gguf_arguments(checkpoint)
    if checkpoint.gguf_file:
        arguments["quantization_config"] = GgufConfig(dequantize=True)
    try:
        with without_progress_bars(), gguf_errors(checkpoint):
            model, info = auto_model.from_pretrained(
                checkpoint.location,
                config=hf_config,
                revision=checkpoint.revision or "main",
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported in `info`, and refused below
                **arguments,
            )
    except SafetensorError as error:
        raise ModelSourceError(
            "model.path", checkpoint.location, f"a weight file is damaged ({error}).", "Copy it again."
        ) from error
    _refuse_missing_weights(info, checkpoint.location)
    return model


def _refuse_missing_weights(info: dict[str, Any], location: str) -> None:
    # transformers fills absent weights with random numbers and only warns.
    for what in ("missing_keys", "mismatched_keys"):
        # A mismatched weight comes as (name, its shape, the shape wanted).
        found = info.get(what) or ()
        names = sorted(name if isinstance(name, str) else str(name[0]) for name in found)
        if names:
            raise ModelSourceError(
                "model.path",
                location,
                f"{len(names)} weights do not fit its config ({what.replace('_keys', '')}: {names[0]}).",
                "Give a complete checkpoint of a causal language model.",
            )


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers' own progress bars off the terminal."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        # The bar of its GGUF reader is tqdm's own, which that switch does not reach.
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


# --- describing --------------------------------------------------------------------------------


def _describe(
    spec: ModelSpec, model: Any, hf_config: Any, dtype: torch.dtype, checkpoint: Checkpoint | None
) -> LoadedModel:
    from runners.models.attention_op import route_attention

    modules, layer_groups = route_attention(model, spec.max_seq_len)
    groups = list(dict.fromkeys(layer_groups))
    total = weight_bytes(model)
    unread = unread_embedding_bytes(model.get_input_embeddings(), model.get_output_embeddings())
    return LoadedModel(
        model=model,
        hf_config=hf_config,
        layers=[groups.index(group) for group in layer_groups],
        groups=groups,
        attention_modules=modules,
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        num_params=count_parameters(model),
        weight_bytes=total,
        decode_weight_bytes=total - unread,
        dtype=dtype,
        source=spec.source,
        revision=checkpoint.revision if checkpoint else None,
        fingerprint=fingerprint(checkpoint.files) if checkpoint and checkpoint.files else None,
        max_position_embeddings=hf_config.max_position_embeddings,
    )


def _fuse(loaded: LoadedModel, max_seq_len: int) -> None:
    """Rewrite the described model, and count again what was merged."""
    from runners.models.fused.rewrite import rewrite

    model = rewrite(loaded.model, loaded.layer_groups, max_seq_len)
    loaded.model, loaded.implementation = model, "fused"
    loaded.attention_modules = [layer.attention for layer in model.layers]  # type: ignore[misc]
    loaded.weight_bytes = weight_bytes(model)
    unread = 0 if model.embedding.data_ptr() == model.head.weight.data_ptr() else model.embedding.nbytes
    # Of the rotary table a step reads a row a request.
    loaded.decode_weight_bytes = loaded.weight_bytes - unread - model.cos_sin.nbytes
