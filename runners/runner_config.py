"""RunnerConfig: how a runner is built, and what cannot work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from runners.cpp_compiler import missing_for_cpu_kernels
from runners.padding import StrategyName
from runners.sampling import Sampling
from runners.step_policy import AboveMax, OnMiss

if TYPE_CHECKING:
    from runners.attention.flashinfer_support import PrefillChoice, TensorCores

CompileMode = Literal["none", "default", "max_autotune", "reduce_overhead"]
COMPILE_MODES = ("default", "max_autotune", "reduce_overhead")
KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class RunnerConfig:
    """How to build a runner. Raises ValueError, with the remedy, for values that cannot work."""

    #: `cpu`, `cuda` or `cuda:N`.
    device: str
    #: The largest decode batch, and the most requests that hold pages at a time.
    max_batch_size: int
    #: The longest request in tokens, prompt and output.
    max_seq_len: int
    #: Batch sizes to capture; see `runners.capture_sizes`. Not used with kind `eager`.
    capture_sizes: tuple[int, ...] = ()
    kind: Literal["cuda_graph", "eager"] = "cuda_graph"
    #: Tokens a page.
    page_size: int = 16
    #: Pages a layer, the null page included; None for enough for `max_batch_size` requests of full length.
    num_pages: int | None = None
    #: `auto` (the model's dtype) or a key of `KV_DTYPES`.
    kv_cache_dtype: str = "auto"
    attention_backend: str = "auto"
    #: FlashInfer's choices; see `runners.attention.flashinfer_support`.
    use_tensor_cores: TensorCores = "auto"
    prefill_kernel: PrefillChoice = "auto"
    #: The most new tokens of one prefill step; the scheduler's chunk.
    prefill_chunk_tokens: int = 512
    #: What happens to batches above the largest capture size.
    above_max: AboveMax = "eager"
    #: What happens to batches within range that have no usable graph.
    on_miss: OnMiss = "eager"
    padding: StrategyName = "nearest"
    #: NaN wherever a correct step must not look; slow, for parity only.
    poison_padding: bool = False
    #: Return copies of the logits instead of views that the next replay overwrites.
    copy_output: bool = False
    #: `none` or a key of `runners.compilation.MODES`.
    compile_mode: CompileMode = "none"
    #: The largest capture size that is compiled; None for all of them.
    compile_max_bs: int | None = None
    #: Compile the whole model, or one function that all its layers share.
    compile_scope: Literal["model", "layer"] = "model"
    #: Compile once for all sizes (and apart for 1), not once a size.
    compile_dynamic: bool = False
    #: Refuse code that torch.compile cannot take as one graph.
    compile_fullgraph: bool = True
    #: How the next token is chosen from the logits, within the captured step.
    sampling: Sampling = Sampling()
    #: Eager steps before each capture.
    num_warmup_steps: int = 2
    #: Folder for the captured graphs in DOT (CUDA only); None for none.
    graph_dump_dir: str | None = None

    def __post_init__(self) -> None:
        for name in (
            "max_batch_size",
            "max_seq_len",
            "page_size",
            "prefill_chunk_tokens",
            "num_warmup_steps",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1.")
        if self.kv_cache_dtype != "auto" and self.kv_cache_dtype not in KV_DTYPES:
            raise ValueError(
                f"kv_cache_dtype={self.kv_cache_dtype}: choose auto or one of {', '.join(KV_DTYPES)}."
            )
        if self.kind == "cuda_graph":
            self._check_capture_sizes()
        if self.compile_mode != "none":
            self._check_compile()

    @property
    def num_kv_pages(self) -> int:
        """Pages of the KV pool, the null page included."""
        return self.num_pages or self.max_batch_size * self.pages_per_request + 1

    @property
    def pages_per_request(self) -> int:
        """Pages of a request of `max_seq_len` tokens."""
        return -(-self.max_seq_len // self.page_size)

    @property
    def compile_sizes(self) -> tuple[int, ...]:
        """The capture sizes that are compiled, sorted."""
        if self.compile_mode == "none":
            return ()
        limit = self.compile_max_bs or max(self.capture_sizes)
        return tuple(size for size in sorted(self.capture_sizes) if size <= limit)

    def kv_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Type of the KV cache of a model of `model_dtype`."""
        return model_dtype if self.kv_cache_dtype == "auto" else KV_DTYPES[self.kv_cache_dtype]

    def _check_capture_sizes(self) -> None:
        sizes = self.capture_sizes
        if not sizes or min(sizes) < 1 or len(set(sizes)) != len(sizes):
            raise ValueError(f"capture_sizes={sizes}: must be distinct batch sizes, each at least 1.")
        if max(sizes) > self.max_batch_size:
            raise ValueError(
                f"capture_sizes ends at {max(sizes)}, above max_batch_size={self.max_batch_size}: remove the "
                "larger sizes, or raise max_batch_size."
            )
        if self.padding == "exact" and self.on_miss == "error" and len(sizes) < max(sizes):
            raise ValueError(
                "padding=exact with on_miss=error refuses every batch whose size is not captured: capture all "
                "sizes (capture=all), or set on_miss=eager or padding=nearest."
            )

    def _check_compile(self) -> None:
        mode, max_bs = f"compile_mode={self.compile_mode}", self.compile_max_bs
        if self.compile_mode not in COMPILE_MODES or self.compile_scope not in ("model", "layer"):
            raise ValueError(
                f"{mode}, compile_scope={self.compile_scope}: choose none, {', '.join(COMPILE_MODES)}, and "
                "model or layer."
            )
        if self.kind == "eager":
            raise ValueError(
                f"{mode} compiles the capture sizes, and kind=eager has none: set kind=cuda_graph."
            )
        if max_bs is not None and max_bs < min(self.capture_sizes):
            raise ValueError(
                f"compile_max_bs={max_bs} is below the smallest capture size, {min(self.capture_sizes)}: raise it, "
                "or set compile_mode=none."
            )
        if self.compile_mode == "reduce_overhead":
            self._check_reduce_overhead()
        if torch.device(self.device).type == "cpu" and (lacking := missing_for_cpu_kernels()):
            raise ValueError(f"{mode} builds kernels for the CPU, and there is {lacking}, or set none.")

    def _check_reduce_overhead(self) -> None:
        largest = max(self.capture_sizes)
        if self.compile_max_bs is not None and self.compile_max_bs < largest:
            raise ValueError(
                f"compile_max_bs={self.compile_max_bs} with compile_mode=reduce_overhead, which captures no size that "
                f"it does not compile: set it to {largest}, or drop the larger capture sizes."
            )
        if "split" in (self.padding, self.above_max):
            raise ValueError(
                "padding=split and above_max=split replay graphs of our own in a row, and with "
                "compile_mode=reduce_overhead there are none: choose another, or compile_mode=default."
            )
