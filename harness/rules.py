"""Combinations of values that cannot run: each rule names a field, its value and the remedy."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from harness.capture_list import capture_list
from harness.errors import ConfigError
from harness.model_cache import missing_model

if TYPE_CHECKING:
    from harness.schema import Config


def check_rules(config: Config) -> None:
    """Raise ConfigError for the first combination that cannot run. Imports no torch."""
    check_device(config)
    check_model(config)
    check_attention(config)
    check_pool(config)
    check_sampling(config)
    check_capture(config)
    check_padding(config)
    check_compile(config)
    check_timed_phases(config)
    check_batches(config)


def check_device(config: Config) -> None:
    """The device exists, and the attention backend runs on it."""
    device = config.device
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise ConfigError("device", device, "write auto, cpu, cuda or cuda:N")
    backend, backend_needs_gpu = (
        config.attention.backend,
        config.attention.backend in ("flashinfer", "triton"),
    )
    if backend_needs_gpu and device == "cpu":
        raise ConfigError("attention.backend", backend, "needs CUDA: write attention=torch, or device=cuda")
    needs_gpu = device.startswith("cuda") or backend_needs_gpu
    if not needs_gpu:
        return
    from harness.nvidia import visible_gpus

    num_gpus = len(visible_gpus())
    if not num_gpus and backend_needs_gpu:
        raise ConfigError(
            "attention.backend",
            backend,
            "needs CUDA, and no GPU is visible: write attention=torch (or auto)",
        )
    if not num_gpus:
        raise ConfigError(
            "device", device, "no GPU is visible: write device=cpu (or auto); see the verb doctor"
        )
    index = int(device.partition(":")[2] or 0)
    if index >= num_gpus:
        raise ConfigError("device", device, f"the GPUs visible are cuda:0 to cuda:{num_gpus - 1}")


def check_model(config: Config) -> None:
    """The model has a source, and the longest request fits its positions."""
    model = config.model
    if model.revision is not None and model.source != "pretrained":
        raise ConfigError(
            "model.revision", model.revision, f"unused with model.source={model.source}: leave it out"
        )
    if model.source == "random":
        if model.path is not None:
            raise ConfigError(
                "model.path", model.path, "unused with random weights: add model.source=pretrained"
            )
        if not model.config.get("model_type"):
            raise ConfigError(
                "model.config.model_type", None, "a random model needs it: choose a preset, model=tiny"
            )
        limit = model.config.get("max_position_embeddings")
        if isinstance(limit, int) and model.max_seq_len > limit:
            raise ConfigError(
                "model.max_seq_len", model.max_seq_len, f"must be at most max_position_embeddings={limit}"
            )
        return
    if model.source == "gguf":
        _check_gguf(model.path)
        return
    if model.path is None:
        raise ConfigError("model.path", None, "model.source=pretrained needs a hub id or a folder here")
    not_fetched = missing_model(model.path)
    if not_fetched is not None:
        raise ConfigError("model.path", model.path, not_fetched)
    is_local = model.path.startswith(("/", "./", "../", "~")) or model.path.count("/") != 1
    if is_local and not Path(model.path).expanduser().exists():
        raise ConfigError(
            "model.path", model.path, "no such folder: correct the path, or give a hub id owner/name"
        )


def _check_gguf(path: str | None) -> None:
    if path is None or not path.endswith(".gguf") or not Path(path).expanduser().is_file():
        problem = "no such file" if path and path.endswith(".gguf") else "model.source=gguf needs a file"
        raise ConfigError("model.path", path, f"{problem}: give the path of one .gguf file")
    missing = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
    if missing:
        raise ConfigError(
            "model.source",
            "gguf",
            f"the package {missing[0]} is not installed: pip install 'cudagraph-harness[gguf]'",
        )


def check_attention(config: Config) -> None:
    """What only FlashInfer has goes with FlashInfer."""
    attention = config.attention
    runs_torch = attention.backend == "torch" or config.device == "cpu"
    if runs_torch and attention.kv_cache_dtype.startswith("float8"):
        raise ConfigError(
            "attention.kv_cache_dtype",
            attention.kv_cache_dtype,
            "only flashinfer computes over a float8 cache: write attention=flashinfer on a CUDA device, or auto here",
        )
    for name in ("use_tensor_cores", "prefill"):
        value = getattr(attention, name)
        if runs_torch and value != "auto":
            raise ConfigError(
                f"attention.{name}",
                value,
                "chooses among flashinfer's kernels, and this job runs torch's: leave it at auto",
            )


def check_pool(config: Config) -> None:
    """The KV pool holds at least one request at full length, and all of them unless overcommitted."""
    attention, num_pages = config.attention, config.attention.num_pages
    if num_pages is None:
        return
    per_request = -(-config.model.max_seq_len // attention.page_size)
    if num_pages - 1 < per_request:
        raise ConfigError(
            "attention.num_pages",
            num_pages,
            f"one request of model.max_seq_len={config.model.max_seq_len} takes {per_request} pages and one page is "
            f"reserved: give at least {per_request + 1}, or lower model.max_seq_len",
        )
    needed = config.runner.max_batch_size * per_request + 1
    if num_pages < needed and not attention.overcommit:
        raise ConfigError(
            "attention.num_pages",
            num_pages,
            f"runner.max_batch_size={config.runner.max_batch_size} requests of model.max_seq_len="
            f"{config.model.max_seq_len} take {needed} pages: give {needed} (or null), lower one of the two, or set "
            "attention.overcommit=true to let the scheduler preempt",
        )


def check_sampling(config: Config) -> None:
    """Nothing restricts the choice of a token where there is none."""
    sampling = config.sampling
    if sampling.temperature > 0:
        return
    for name, chosen in (("top_k", sampling.top_k > 0), ("top_p", sampling.top_p < 1)):
        if chosen:
            raise ConfigError(
                f"sampling.{name}",
                getattr(sampling, name),
                "restricts what is sampled, and sampling.temperature=0 takes the largest logit: add "
                "sampling.temperature=1, or leave it out",
            )


def check_capture(config: Config) -> None:
    """The capture list can be made, and lies within the runner's maximum."""
    largest, capture = config.runner.max_batch_size, config.capture
    if capture.max_size is not None and capture.max_size > largest:
        raise ConfigError(
            "capture.max_size",
            capture.max_size,
            f"must be at most runner.max_batch_size={largest}: lower it or raise that",
        )
    if capture.sizes and capture.policy != "explicit":
        raise ConfigError(
            "capture.sizes", capture.sizes, "goes with capture=explicit: add that, or remove the list"
        )
    too_large = [size for size in capture.sizes if size > largest]
    if too_large:
        raise ConfigError(
            "capture.sizes",
            capture.sizes,
            f"{too_large[0]} is over runner.max_batch_size={largest}: remove it or raise that",
        )
    capture_list(config)


def check_padding(config: Config) -> None:
    """`exact` finds a graph for every batch if a miss is an error; the costs can be read."""
    padding, runner = config.padding, config.runner
    if padding.strategy == "exact" and runner.on_miss == "error" and runner.kind == "cuda_graph":
        sizes = capture_list(config).sizes
        missing = sorted(set(range(1, sizes[-1] + 1)) - set(sizes))
        if missing:
            raise ConfigError(
                "padding.strategy",
                "exact",
                f"with runner.on_miss=error every batch needs its own graph, and size {missing[0]} has none: "
                "write capture=all, runner.on_miss=eager or padding=nearest",
            )
    if padding.costs_path is not None:
        check_costs("padding.costs_path", padding.costs_path)


def check_costs(field: str, path: str) -> None:
    """The `sizes.csv` at `path` can be read."""
    from runners.padding import StepCosts

    try:
        StepCosts.from_sizes_csv(path)
    except OSError as error:
        raise ConfigError(field, path, f"{error.strerror}: give the sizes.csv of a run") from error
    except (ValueError, KeyError) as error:
        raise ConfigError(
            field, path, f"not a sizes.csv ({error}): give the one in a run's folder"
        ) from error


def check_compile(config: Config) -> None:
    """Only sizes that are captured can be compiled, and only where there is a compiler."""
    max_bs, mode = config.compile.max_bs, config.compile.mode
    largest = config.capture.max_size or config.runner.max_batch_size
    if max_bs is not None and max_bs > largest:
        raise ConfigError(
            "compile.max_bs",
            max_bs,
            f"must be at most the largest capture size, {largest}: lower it or leave it null",
        )
    if mode == "none":
        return
    if config.model.implementation == "fused":
        raise ConfigError(
            "compile.mode",
            mode,
            "compiles transformers' layers: add model.implementation=transformers, or compile=none",
        )
    if config.runner.kind == "eager":
        raise ConfigError(
            "compile.mode", mode, "compiles capture sizes, and runner=eager has none: add runner=cuda_graph"
        )
    smallest = capture_list(config).sizes[0]
    if max_bs is not None and max_bs < smallest:
        raise ConfigError(
            "compile.max_bs",
            max_bs,
            f"compiles nothing, the smallest capture size is {smallest}: raise it, or write compile=none",
        )
    if mode == "reduce_overhead":
        _check_reduce_overhead(config)
    _check_compiler(config)


def _check_reduce_overhead(config: Config) -> None:
    max_bs, largest = config.compile.max_bs, capture_list(config).sizes[-1]
    if max_bs is not None and max_bs < largest:
        raise ConfigError(
            "compile.max_bs",
            max_bs,
            f"reduce_overhead runs every capture size compiled, up to {largest}: leave it null, or lower "
            "capture.max_size",
        )
    for field, value in (
        ("padding.strategy", config.padding.strategy),
        ("runner.above_max", config.runner.above_max),
    ):
        if value == "split":
            raise ConfigError(
                field,
                value,
                "replays graphs of our own, and with compile=reduce_overhead there are none: choose another, or "
                "write compile=default",
            )


def _check_compiler(config: Config) -> None:
    from harness.nvidia import visible_gpus
    from runners.cpp_compiler import missing_for_cpu_kernels

    if config.device.startswith("cuda") or (config.device == "auto" and visible_gpus()):
        return
    lacking = missing_for_cpu_kernels()
    if lacking is not None:
        raise ConfigError(
            "compile.mode",
            config.compile.mode,
            f"builds kernels for the CPU, and there is {lacking}, or write compile=none",
        )


def check_timed_phases(config: Config) -> None:
    """No latency is taken while padding is poisoned; the cache is flushed between isolated steps only."""
    timed = [name for name in ("measure", "workload") if getattr(config, name).enabled]
    if config.runner.poison_padding and timed:
        switches = " ".join(f"{name}=none" for name in timed)
        raise ConfigError(
            "runner.poison_padding",
            True,
            f"spoils the latencies of the timed phases: add {switches}, or set it to false",
        )
    if config.measure.enabled and config.measure.flush_cache and config.runner.overlap:
        raise ConfigError(
            "measure.flush_cache",
            True,
            "two steps in flight leave no moment between them to flush in: add runner.overlap=false, or leave it out",
        )


def check_batches(config: Config) -> None:
    """Batches and lengths to measure lie within what the runner is built for."""
    largest, longest = config.runner.max_batch_size, config.model.max_seq_len
    check_within("measure.batch_sizes", config.measure.batch_sizes, "runner.max_batch_size", largest)
    check_within("parity.batch_sizes", config.parity.batch_sizes, "runner.max_batch_size", largest)
    if config.attention.num_pages is not None:
        pages = config.attention.num_pages
        check_within(
            "parity.batch_sizes", config.parity.batch_sizes, "attention.num_pages less one", pages - 1
        )
    if not config.measure.enabled:
        return
    if not config.measure.context_lens:
        raise ConfigError(
            "measure.context_lens", [], "give at least one length, such as [128], or add measure=none"
        )
    check_within("measure.context_lens", config.measure.context_lens, "model.max_seq_len", longest)
    check_within("measure.longest_lens", config.measure.longest_lens, "model.max_seq_len", longest)
    for name in ("eager_batch_sizes", "loop_batch_sizes"):
        check_within(f"measure.{name}", getattr(config.measure, name), "runner.max_batch_size", largest)
    if config.measure.loop_batch_sizes and config.runner.overlap:
        raise ConfigError(
            "measure.loop_batch_sizes",
            config.measure.loop_batch_sizes,
            "times the loop with one step in flight: empty it, or set runner.overlap=false",
        )
    check_room(config)
    check_within("measure.prefill_tokens", config.measure.prefill_tokens, "model.max_seq_len", longest)


def check_room(config: Config) -> None:
    """The batches to measure fit into the pool at the shortest context; at longer ones fewer are measured."""
    attention, measure = config.attention, config.measure
    if attention.num_pages is None or not measure.batch_sizes:
        return
    shortest = min(measure.context_lens)
    room = (attention.num_pages - 1) // -(-shortest // attention.page_size)
    if max(measure.batch_sizes) > room:
        raise ConfigError(
            "measure.batch_sizes",
            measure.batch_sizes,
            f"attention.num_pages={attention.num_pages} holds {room} requests of {shortest} tokens: remove what is "
            "over that, leave the list empty, lower measure.context_lens or raise attention.num_pages",
        )


def check_within(field: str, values: list[int], limit_field: str, limit: int) -> None:
    """No value is over the limit of another field."""
    if values and max(values) > limit:
        raise ConfigError(
            field, values, f"{max(values)} is over {limit_field}={limit}: remove it or raise that"
        )
