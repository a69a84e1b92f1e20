"""From the configuration of a job to the arguments of the runners."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from harness.capture_list import capture_list
from harness.scheduler import SchedulerLimits
from runners.model_runner import RunnerConfig
from runners.models.loader import ModelSpec
from runners.sampling import Sampling

if TYPE_CHECKING:
    import torch

    from harness.schema import Config, ModelConfig
    from runners.models.loader import LoadedModel


def model_spec(config: Config) -> ModelSpec:
    """Return what the loader needs to know of `config.model`."""
    model = config.model
    return ModelSpec(
        source=model.source,
        path=model.path,
        revision=model.revision,
        dtype=model.dtype,
        seed=config.seed,
        max_seq_len=model.max_seq_len,
        config=dict(model.config),
        implementation=model.implementation,
    )


def runner_config(config: Config, device: torch.device) -> RunnerConfig:
    """Return the runner's own configuration; the schema has checked the choices that are cast here."""
    runner, compile_, sampling = config.runner, config.compile, config.sampling
    sizes = capture_list(config).sizes if runner.kind == "cuda_graph" else ()
    return RunnerConfig(
        device=str(device),
        kind=cast(Any, runner.kind),
        max_batch_size=runner.max_batch_size,
        max_seq_len=config.model.max_seq_len,
        page_size=config.attention.page_size,
        num_pages=config.attention.num_pages,
        kv_cache_dtype=config.attention.kv_cache_dtype,
        attention_backend=config.attention.backend,
        use_tensor_cores=cast(Any, config.attention.use_tensor_cores),
        prefill_kernel=cast(Any, config.attention.prefill),
        prefill_chunk_tokens=runner.prefill_chunk_tokens,
        capture_sizes=tuple(sizes),
        above_max=cast(Any, runner.above_max),
        on_miss=cast(Any, runner.on_miss),
        padding=cast(Any, config.padding.strategy),
        poison_padding=runner.poison_padding,
        copy_output=runner.copy_output,
        compile_mode=cast(Any, compile_.mode),
        compile_max_bs=compile_.max_bs,
        compile_scope=cast(Any, compile_.scope),
        compile_dynamic=compile_.dynamic,
        compile_fullgraph=compile_.fullgraph,
        sampling=Sampling(
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            config.seed if sampling.seed is None else sampling.seed,
        ),
        num_warmup_steps=runner.num_warmup_steps,
    )


def scheduler_limits(config: Config, num_pages: int | None = None) -> SchedulerLimits:
    """Return what the scheduler may use: the pool less its null page, the chunk, the longest request.

    `num_pages` is the pool as it was built; None for what the configuration asks for.
    """
    runner, attention = config.runner, config.attention
    pages_per_request = -(-config.model.max_seq_len // attention.page_size)
    num_pages = num_pages or attention.num_pages or runner.max_batch_size * pages_per_request + 1
    return SchedulerLimits(
        max_batch_size=runner.max_batch_size,
        num_pages=num_pages - 1,
        page_size=attention.page_size,
        prefill_chunk_tokens=runner.prefill_chunk_tokens,
        max_seq_len=config.model.max_seq_len,
    )


def describe_model(model: ModelConfig, loaded: LoadedModel) -> dict[str, Any]:
    """Return the `model` part of `result.json`."""
    return {
        "name": model.name,
        "source": loaded.source,
        "path": model.path,
        "revision": loaded.revision,
        "fingerprint": loaded.fingerprint,
        "model_type": loaded.hf_config.model_type,
        "implementation": model.implementation,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "num_params": loaded.num_params,
        "weight_bytes": loaded.weight_bytes,
        "decode_weight_bytes": loaded.decode_weight_bytes,
        "weight_format": None,
        "num_layers": loaded.num_layers,
        "hidden_size": loaded.hidden_size,
        "vocab_size": loaded.vocab_size,
        "attention_groups": [asdict(group) for group in loaded.groups],
    }
