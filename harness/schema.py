"""The typed configuration of one job. YAML composes it, this file declares what it may hold.

Imports no torch: `--help`, `--cfg job` and the verbs that read records stay fast.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from harness.errors import ConfigError
from harness.fields import check_fields, number, numbers, one_of
from harness.lengths import LengthSpec as LengthSpec
from harness.lengths import length_spec


@dataclass
class ModelConfig:
    name: str = "tiny"
    """What the record, the report and W&B call the model."""
    source: str = one_of("random", "random", "pretrained", "gguf")
    """`random`: weights from the seed, shaped by `config`; `pretrained`: from `path`; `gguf`: a GGUF file."""
    path: str | None = None
    """Hub id, local folder or file of the weights; unused with `random`."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; resolved to a commit and recorded."""
    dtype: str = one_of("auto", "auto", "float32", "bfloat16", "float16")
    """Type of weights and activations; `auto` takes the checkpoint's (float32 for `random`)."""
    implementation: str = one_of("transformers", "transformers", "fused")
    """`fused` rewrites the loaded modules and must pass the same parity check."""
    max_seq_len: int = number(512, ge=2)
    """Longest request, prompt and output together, in tokens."""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of the Hugging Face config, `model_type` among them; shapes a `random` model."""


@dataclass
class AttentionConfig:
    backend: str = one_of("auto", "auto", "torch", "flashinfer", "triton")
    """`auto`: flashinfer on CUDA where it can serve the model (else torch, with a warning), torch elsewhere;
    with `model.implementation=fused` on CUDA, our own decode kernel (triton) over that for prefill."""
    page_size: int = number(16, ge=1)
    """Tokens a KV page."""
    num_pages: int | None = number(None, ge=2)
    """Pages of the KV pool, the reserved null page included; null: enough for every request at full length, on
    CUDA no more than fit."""
    memory_fraction: float = number(0.9, gt=0.0, le=1.0)
    """Part of the device memory that is free once the weights are loaded, for all that follows; sizes the pool on
    CUDA where `num_pages` is null."""
    overcommit: bool = False
    """Admit a pool smaller than `max_batch_size` requests at full length; the scheduler then preempts."""
    kv_cache_dtype: str = one_of(
        "auto", "auto", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"
    )
    """Type of the KV cache; `auto` is the model's. The float8 ones need flashinfer."""
    use_tensor_cores: str = one_of("auto", "auto", "always", "never")
    """Decode on flashinfer's tensor-core kernels; `auto`: from four query heads a KV head on, and for float8."""
    prefill: str = one_of("auto", "auto", "fa2", "fa3")
    """Flashinfer's prefill kernels; `auto`: fa3 on Hopper where it is built, fa2 elsewhere."""


@dataclass
class RunnerConfig:
    kind: str = one_of("cuda_graph", "cuda_graph", "eager")
    """`eager` captures nothing: the baseline."""
    max_batch_size: int = number(16, ge=1)
    """The largest running batch."""
    above_max: str = one_of("eager", "eager", "split", "error")
    """What a batch above the largest capture size does."""
    on_miss: str = one_of("eager", "eager", "error")
    """What a batch within range does that has no usable graph."""
    poison_padding: bool = False
    """Fill padding storage with NaN before each replay. Slow: refused with the timed phases."""
    copy_output: bool = False
    """Return a copy of the logits instead of a view that the next replay overwrites."""
    overlap: bool = False
    """Schedule the next step while the device runs this one."""
    prefill_chunk_tokens: int = number(512, ge=1)
    """Most tokens of one prefill step."""
    num_warmup_steps: int = number(2, ge=1)
    """Eager runs of a size before its capture."""


@dataclass
class SamplingConfig:
    temperature: float = number(0.0, ge=0)
    """Divides the logits; 0 is greedy: the largest one. Tokens are chosen within the captured step."""
    top_k: int = number(0, ge=0)
    """Sample from the `top_k` most likely tokens; 0: from all."""
    top_p: float = number(1.0, gt=0, le=1)
    """Sample from the fewest tokens that hold this share of the probability."""
    seed: int | None = number(None, ge=0, le=2**32 - 1)
    """Seeds the random numbers; null: `seed`."""


@dataclass
class CaptureConfig:
    policy: str = one_of(
        "vllm",
        *("vllm", "sglang", "tensorrt_llm", "pymllm", "nano_vllm", "mini_sglang", "lmdeploy", "tgi"),
        *("powers_of_two", "all", "max_only", "explicit", "planned"),
    )
    """Whose capture list to use."""
    sizes: list[int] = numbers()
    """The capture list of `policy=explicit`."""
    max_size: int | None = number(None, ge=1)
    """Largest capture size; null: `runner.max_batch_size`."""
    allow_gap: bool = False
    """Keep the gap that an engine's schedule leaves below the maximum, with a warning."""
    plan_path: str | None = None
    """A planner's output file, for `policy=planned`."""


@dataclass
class PaddingConfig:
    strategy: str = one_of("nearest", "nearest", "exact", "max", "cheapest", "split")
    """How a batch is brought to captured sizes."""
    costs_path: str | None = None
    """A `sizes.csv` with measured costs for `cheapest` and `split`; null: those of this run's size sweep."""


@dataclass
class CompileConfig:
    mode: str = one_of("none", "none", "default", "max_autotune", "reduce_overhead")
    """torch.compile mode. `none`, never `off`: YAML reads `off` as a boolean."""
    max_bs: int | None = number(None, ge=1)
    """Largest capture size that is compiled; null: all. Larger ones are captured uncompiled."""
    scope: str = one_of("model", "model", "layer")
    """Compile the model as one graph, or one layer that all layers reuse."""
    dynamic: bool = False
    """Compile once for all sizes (and apart for 1), not once a size."""
    fullgraph: bool = True
    """A graph break is an error; false: it is counted."""


@dataclass
class ColumnsConfig:
    """Names of the columns of a trace with `format=csv`."""

    arrival_s: str | None = None
    """Arrival time in seconds, or a timestamp."""
    prompt_len: str | None = None
    """Prompt tokens."""
    output_len: str | None = None
    """Output tokens."""


@dataclass
class WorkloadConfig:
    enabled: bool = True
    """Replay a workload after the size sweep."""
    kind: str = one_of("synthetic", "steady", "ramp", "synthetic", "trace", "lengths")
    """Where the requests come from."""
    batch_size: int | None = number(None, ge=1)
    """Running requests of `steady`; null: `runner.max_batch_size`."""
    path: str | None = None
    """The trace, or the histogram of `lengths`; null: the shipped histogram."""
    format: str = one_of("azure", "azure", "mooncake", "burstgpt", "qwen_bailian", "timed_trace", "csv")
    """The trace's published format."""
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    """Column names of `format=csv`."""
    sec_multiplier: float = number(1.0, gt=0)
    """Seconds of one unit of time of `format=timed_trace`, as in vLLM."""
    max_requests: int | None = number(None, ge=1)
    """Requests to take or to make; null: all of a trace (bounded by `duration_s` otherwise)."""
    duration_s: float | None = number(None, gt=0)
    """Arrivals after this time, on the virtual clock, are left out."""
    arrival: str = one_of("poisson", "constant", "poisson", "gamma")
    """Arrival process of `synthetic` and `lengths`."""
    request_rate: float | None = number(None, gt=0, infinite=True)
    """Requests a second; `inf`: all at once. Null: 16, and for a trace its own rate."""
    start_rate: float = number(1.0, gt=0)
    """Requests a second at the start of a `ramp`, which ends at `request_rate`."""
    burstiness: float = number(1.0, gt=0)
    """Shape of gamma arrivals, as in vLLM: 1 is Poisson, less is burstier."""
    burst_size: int = number(0, ge=0)
    """Of the requests of `synthetic` and `lengths`, how many arrive together, `burst_at_s` after the start."""
    burst_at_s: float = number(0.0, ge=0)
    """When the burst arrives; 0 starts the replay with a warm batch."""
    rate_scale: float = number(1.0, gt=0)
    """Speeds a trace's arrivals up by this factor."""
    max_concurrency: int | None = number(None, ge=1)
    """Requests in flight at most; it delays the sending."""
    prompt_len: Any = 64
    """Prompt tokens: a whole number, or a distribution (LengthSpec)."""
    output_len: Any = 32
    """Output tokens: a whole number, or a distribution (LengthSpec)."""
    over_length: str = one_of("clip", "clip", "skip", "error")
    """What happens to a request longer than `model.max_seq_len`; counted."""
    clock: str = one_of("measured", "measured", "fixed", "costs")
    """`measured` advances by each step's time; `fixed` and `costs` give equal files in every run."""
    fixed_step_ms: float | None = number(None, gt=0)
    """Time of a step under `clock=fixed`."""
    fixed_eager_step_ms: float | None = number(None, gt=0)
    """Time of an eager decode step under `clock=fixed`; null: `fixed_step_ms`."""
    costs_path: str | None = None
    """A `sizes.csv`, with the `prefill.csv` beside it, whose times drive `clock=costs`."""


@dataclass
class MeasureConfig:
    enabled: bool = True
    """Run the size sweep."""
    batch_sizes: list[int] = numbers()
    """Batch sizes of the size sweep; empty: on, between and beyond the capture sizes."""
    context_lens: list[int] = numbers(128)
    """KV tokens of each request in the size sweep."""
    prefill_tokens: list[int] = numbers()
    """Sizes of the prefill chunks to time; empty: chosen from `runner.prefill_chunk_tokens`."""
    eager_batch_sizes: list[int] = numbers()
    """Batch sizes that also run eagerly in the size sweep; empty: all."""
    longest_lens: list[int] = numbers()
    """KV tokens of one long request among short ones, at each captured size; empty: all requests are alike."""
    loop_batch_sizes: list[int] = numbers()
    """Batch sizes to time in the scheduler's loop, beside prefills, before and after the workload; empty: none."""
    min_samples: int = number(20, ge=2)
    """Samples a point at least."""
    min_time_s: float = number(0.0, ge=0)
    """Seconds a point at least."""
    max_noise: float = number(0.05, gt=0)
    """Stop once the relative standard deviation and the relative IQR are below this."""
    timeout_s: float = number(10.0, gt=0)
    """Seconds a point at most; the condition not met is recorded."""
    num_warmup: int = number(5, ge=0)
    """Steps before the first sample, never counted; three at least, since code may compile in them."""
    rounds: int = number(1, ge=1)
    """Times that the sweep visits each point, with its share of samples and time each: how much the rounds
    of a point differ says how much another run would, which `compare` uses."""
    flush_cache: bool = False
    """Empty the last-level cache before each isolated sample, outside of its time."""
    energy_s: float = number(0.2, ge=0)
    """Seconds of back-to-back steps to count the energy of, where the card counts it; 0: do not."""
    profile: bool = False
    """Profile a few steps of the graphs after all that is timed: kernels, their time and the gaps between."""


@dataclass
class ParityConfig:
    enabled: bool = True
    """Prove that replay equals eager before anything is timed."""
    rtol: float | None = number(None, ge=0)
    """Relative tolerance; null: by dtype."""
    atol: float | None = number(None, ge=0)
    """Absolute tolerance; null: by dtype."""
    on_failure: str = one_of("error", "error", "warn")
    """`warn` goes on, and marks every output as unverified."""
    batch_sizes: list[int] = numbers()
    """Batch sizes to prove; empty: on and off the captured sizes."""


@dataclass
class TrackingConfig:
    mode: str = one_of("offline", "offline", "online", "disabled")
    """How to publish the recorded job to Weights & Biases."""
    project: str = "cudagraph-harness"
    """W&B project."""
    entity: str | None = None
    """W&B user or team; null: the account's default."""
    group: str | None = None
    """W&B group; null: the sweep."""
    tags: list[str] = field(default_factory=list)
    """W&B tags; the groups chosen are added."""
    dir: str | None = None
    """Folder of the W&B files; null: the job's folder."""


@dataclass
class JobConfig:
    timeout_s: float | None = number(None, gt=0)
    """Ends the job after this many seconds, with status `timeout`."""
    max_memory_mib: float | None = number(None, gt=0, infinite=True)
    """Host memory that a sweep's job may hold before it is killed; null: nine tenths of the machine's; inf: any."""
    objective: list[str] = field(default_factory=list)
    """Figures returned to a sweeper that searches, such as `summary.median_tpot_ms`; the sweeper says which way is good."""


@dataclass
class SweepConfig:
    id: str | None = None
    """Name of the sweep: its folder is `outputs/NAME`."""
    resume: bool = False
    """Go on with the sweep of that name (or of `output_dir`), if it began: what has ended is not run again."""
    dry_run: bool = False
    """Print the points and their estimated cost, and run none."""
    stop_on_first_failure: bool = False
    """Skip the jobs after one that failed."""


@dataclass
class Config:
    device: str = "auto"
    """`auto` (CUDA if there is any), `cpu`, `cuda` or `cuda:N`."""
    seed: int = number(0, ge=0, le=2**32 - 1)
    """Seeds weights, prompts and arrivals."""
    output_dir: str = "outputs/job"
    """The job's folder; the sweep's folder with -m."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """What decodes."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """Attention kernels and the KV cache."""
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    """How a step runs."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How the next token is chosen."""
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    """Which batch sizes get a graph."""
    padding: PaddingConfig = field(default_factory=PaddingConfig)
    """Which graph a batch replays."""
    compile: CompileConfig = field(default_factory=CompileConfig)
    """torch.compile before the capture."""
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    """The traffic."""
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    """The size sweep."""
    parity: ParityConfig = field(default_factory=ParityConfig)
    """Replay against eager."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Weights & Biases."""
    job: JobConfig = field(default_factory=JobConfig)
    """Limits of one job."""
    sweep: SweepConfig = field(default_factory=SweepConfig)
    """A run of many jobs."""


@functools.cache
def register() -> None:
    """Put the schema into Hydra's ConfigStore, where `conf/config.yaml` names it as its base."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=Config, provider="harness")


def load_config(resolved_yaml: str | Path) -> Config:
    """Read a composed configuration into its types: YAML text, or the path of a YAML file.

    A text of one line is a path if it exists or ends in `.yaml` or `.yml`. Raises ConfigError for a file
    that cannot be read, an unknown key or a value of the wrong type; ranges and combinations are `check`'s.
    """
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from harness.explain import explain_omegaconf

    given = None
    try:
        given = OmegaConf.create(_text(resolved_yaml))
        if not isinstance(given, DictConfig):
            raise ConfigError("configuration", "...", "must hold keys and values, as --cfg job prints them")
        config = cast(Config, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), given)))
    except OmegaConfBaseException as error:
        raise explain_omegaconf(error, given) from error
    except YAMLError as error:
        raise ConfigError("configuration", "...", f"is not YAML: {error}") from error
    config.workload.prompt_len = length_spec("workload.prompt_len", config.workload.prompt_len)
    config.workload.output_len = length_spec("workload.output_len", config.workload.output_len)
    return config


def _text(resolved_yaml: str | Path) -> str:
    if isinstance(resolved_yaml, str) and not _is_path(resolved_yaml):
        return resolved_yaml
    try:
        return Path(resolved_yaml).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ConfigError(
            "configuration", resolved_yaml, f"{reason}: give a YAML file, or its text"
        ) from error


def _is_path(text: str) -> bool:
    is_line = "\n" not in text.strip()
    return is_line and (text.endswith((".yaml", ".yml")) or os.path.exists(text))  # Path.exists may raise


def check(config: Config) -> None:
    """Raise ConfigError for the first value or combination that cannot run; loads no weight."""
    from harness.objective import check_objective
    from harness.rules import check_device, check_rules
    from harness.workload_rules import check_workload

    check_fields(config)
    check_device(config)  # First: "needs CUDA" tells more than what follows from it.
    check_rules(config)
    if config.workload.enabled:
        check_workload(config)
    check_objective(config)
