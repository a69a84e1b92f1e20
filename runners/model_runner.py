"""ModelRunner: owns the model, the KV pool, the attention backend and the graph runner."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from runners.attention import AttentionOptions, create_attention_backend
from runners.capture import CaptureRecord, CompileCost, Forward
from runners.cuda_graph_runner import CudaGraphRunner
from runners.errors import RunnerError
from runners.forward_batch import ForwardBatch, LogitsProcessorOutput
from runners.graph_pool import clear_cublas_workspaces
from runners.input_buffers import InputBuffers
from runners.models.context import forward_context
from runners.models.fused.gemm_choice import bucket
from runners.models.fused.launch import compile_ahead
from runners.models.fused.tuning import Tuning, tune
from runners.models.loader import bind_kv
from runners.padding import StepOutcome, StepPlan
from runners.paged_kv import PagedKV
from runners.runner_config import RunnerConfig
from runners.sampling import Sampler
from runners.stopwatch import Stopwatch
from runners.token_feed import feed_tokens

if TYPE_CHECKING:
    from runners.compilation import CompiledModel
    from runners.compile_counts import CompileCounts
    from runners.models.loader import LoadedModel

__all__ = ["ModelRunner", "RunnerConfig"]


class ModelRunner:
    """Runs prefill and decode steps of one model on one device.

    Decode batches go to the graph runner, which replays a graph or falls back to eager as its policies
    say; prompts always run eager. Use it as a context manager, or call `close`.

    Args:
        loaded: the model, as `runners.models.loader.load_model` returns it.
        config: sizes and policies.
        on_capture: called with the `CaptureRecord` of each captured size.
        on_compile: called with each compiled size and what it took, before the first capture.

    Attributes:
        graph_runner: None with kind `eager`.
        outcome: how the last step ran; None before the first.
        stopwatch: set one to time the device region of the next steps (the graphs, or the model's kernels).
        token_ids: `[max_batch_size]` int64, the ids that the last step sampled, request by request: what
            `ForwardBatch.token_source` of the next one refers to.
        sampler: chooses them. Its `reset` begins the sequence of random numbers again.
        tuning: which recipes the fused layers use and why; None for other implementations.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: RunnerConfig,
        on_capture: Callable[[CaptureRecord], None] | None = None,
        on_compile: Callable[[int, CompileCost], None] | None = None,
    ) -> None:
        self.loaded = loaded
        self.model = loaded.model
        self.config = config
        self.on_capture = on_capture
        self.on_compile = on_compile
        self.device = _resolve_device(config.device)
        self.dtype = loaded.dtype
        self.vocab_size = loaded.vocab_size
        self.max_running_requests = config.max_batch_size
        self.outcome: StepOutcome | None = None
        self.stopwatch: Stopwatch | None = None
        self.graph_runner: CudaGraphRunner | None = None
        self.token_ids = torch.zeros(config.max_batch_size, dtype=torch.int64, device=self.device)
        self.sampler = Sampler(config.sampling, self.device)
        self.tuning: Tuning | None = None
        self.kv = self._build_kv()
        try:
            bind_kv(loaded, self.kv)
            is_fused = loaded.implementation == "fused"
            self.attn_backend = create_attention_backend(
                config.attention_backend,
                loaded.groups,
                self.kv,
                AttentionOptions(
                    config.max_batch_size,
                    config.max_seq_len,
                    self.device,
                    self.dtype,
                    config.use_tensor_cores,
                    config.prefill_kernel,
                    fused=is_fused,
                ),
            )
            fill = self.attn_backend.get_cuda_graph_seq_len_fill_value()
            self._eager_inputs = InputBuffers(config.max_batch_size, fill, self.device)
            if is_fused:
                self._tune(self.model, config)
            if config.kind == "cuda_graph":
                self.graph_runner = CudaGraphRunner(self)
        except BaseException:
            self.close()
            raise

    def _tune(self, model: Any, config: RunnerConfig) -> None:
        """Choose how the fused layers run at each size, and compile their kernels side by side."""
        sizes = config.capture_sizes or range(1, config.max_batch_size + 1)
        self.tuning = tune(model, self.attn_backend, sizes)
        if self.attn_backend.name != "triton":
            return
        started = time.perf_counter()
        with compile_ahead():
            for size in {bucket(size): size for size in sorted(sizes)}.values():
                self.attn_backend.init_forward_metadata(self._eager_inputs.static_batch(size))
                self.compute_logits(self._eager_inputs.static_batch(size))
        self.token_ids.zero_()  # the garbage of launches that did not run
        self.sampler.reset()
        torch.cuda.synchronize(self.device)
        self.tuning.compile_s = time.perf_counter() - started

    def _build_kv(self) -> PagedKV:
        config = self.config
        return PagedKV(
            self.loaded.layer_groups,
            num_pages=config.num_kv_pages,
            page_size=config.page_size,
            max_requests=config.max_batch_size,
            max_seq_len=config.max_seq_len,
            dtype=config.kv_dtype(self.dtype),
            device=self.device,
        )

    @property
    def graph_backend(self) -> str:
        """`cuda`, `emulated`, `inductor` (graphs of its own, where there is CUDA) or, without graphs, `none`."""
        return "none" if self.graph_runner is None else self.graph_runner.graph_backend

    def is_compiled(self, plan: StepPlan) -> bool:
        """Return True if each part of a decode step that runs as `plan` runs compiled code."""
        return self.graph_runner is not None and self.graph_runner.is_compiled(plan)

    @property
    def compile_counts(self) -> CompileCounts | None:
        """What torch.compile came to so far; None if nothing is compiled."""
        compiled = None if self.graph_runner is None else self.graph_runner.compiled
        return None if compiled is None else compiled.counts

    def forward(self, batch: ForwardBatch, plan: StepPlan | None = None) -> LogitsProcessorOutput:
        """Run one step and return the logits of each request's last token.

        `plan` forces the way a decode step runs; see `CudaGraphRunner.replay`, also for the errors and
        for how long the logits are valid.
        """
        started = time.perf_counter_ns()
        if batch.forward_mode.is_extend():
            return self._run_eager(batch, StepPlan("eager", (), "prefill"), started)
        if self.graph_runner is not None:
            output = self.graph_runner.replay(batch, plan)
            self.outcome = self.graph_runner.outcome
            return output
        if plan is not None and plan.mode != "eager":
            raise RunnerError(
                f"the plan {plan.mode}{plan.sizes} needs graphs: build the runner with kind=cuda_graph."
            )
        sizes, reason = ((), "no_graphs") if plan is None else (plan.sizes, plan.reason or "forced")
        return self._run_eager(batch, StepPlan("eager", sizes, reason), started)

    def forward_eager(self, batch: ForwardBatch, padded_size: int | None = None) -> LogitsProcessorOutput:
        """Run one step without graphs, a decode step padded to `padded_size` rows if that is given."""
        sizes = () if padded_size is None else (padded_size,)
        return self._run_eager(batch, StepPlan("eager", sizes, "forced"), time.perf_counter_ns())

    def _run_eager(self, batch: ForwardBatch, plan: StepPlan, started: int) -> LogitsProcessorOutput:
        if batch.batch_size == 0:
            logits = torch.empty((0, self.vocab_size), dtype=self.dtype, device=self.device)
            prepare_ns = time.perf_counter_ns() - started
        else:
            prepared = self.prepare_eager(batch, plan.sizes[0] if plan.sizes else None)
            prepare_ns = time.perf_counter_ns() - started
            logits = self.compute_timed(prepared)[: batch.batch_size]
        padded = plan.padded_batch_size(batch.batch_size)
        self.outcome = StepOutcome(
            "eager", plan.reason, batch.batch_size, padded, 0, prepare_ns / 1e3, sizes=plan.sizes
        )
        return LogitsProcessorOutput(logits, self.token_ids[: batch.batch_size])

    def prepare_eager(self, batch: ForwardBatch, padded_size: int | None = None) -> ForwardBatch:
        """Bring a batch to the device and plan attention for it; return what `compute_logits` takes.

        A decode batch is padded to `padded_size` rows, if that is given.
        """
        self.kv.flush()
        if batch.forward_mode.is_extend():
            prepared = batch.to(self.device)
        else:
            self._eager_inputs.populate(batch)
            prepared = self._eager_inputs.populated_batch(padded_size or batch.batch_size, batch)
        self.attn_backend.init_forward_metadata(prepared)
        return prepared

    def compute_timed(self, batch: ForwardBatch, forward: Forward | None = None) -> torch.Tensor:
        """`forward` (`compute_logits` if None) under the stopwatch."""
        forward = forward or self.compute_logits
        if self.stopwatch is None:
            return forward(batch)
        self.stopwatch.start()
        logits = forward(batch)
        self.stopwatch.stop()
        return logits

    def compute_logits(self, batch: ForwardBatch, model: CompiledModel | None = None) -> torch.Tensor:
        """Feed token ids, call the model on a planned batch, sample: `[batch_size, vocab_size]` logits.

        All of it is in the captured region: ids go from step to step on the device, before the host has
        seen them. `model` is the compiled one, or None for the eager one.
        """
        is_greedy = self.config.sampling.is_greedy
        with torch.no_grad(), forward_context(self.attn_backend, batch, self.token_ids, is_greedy):
            if batch.token_source is not None and self.loaded.implementation != "fused":
                feed_tokens(batch.input_ids, batch.token_source, self.token_ids)
            output = (model or self.model)(
                input_ids=batch.input_ids.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=self._last_tokens(batch),
            )
            logits: torch.Tensor = output.logits[0]
            if getattr(output, "next_token_ids", None) is None:
                self.sampler.sample(logits, self.token_ids[: batch.batch_size])
        return logits

    def _last_tokens(self, batch: ForwardBatch) -> torch.Tensor | int:
        """Index of each request's last token among the packed ones; 0, for all, in a decode step."""
        if batch.extend_seq_lens_cpu is None:
            return 0
        last = torch.tensor(batch.extend_seq_lens_cpu).cumsum(0) - 1
        return last.to(self.device, non_blocking=True)

    def close(self) -> None:
        """Free the graphs, the KV pool and the static inputs. The model stays loaded."""
        if "kv" not in self.__dict__:
            return
        if self.graph_runner is not None:
            self.graph_runner.shutdown()
        self._unbind_kv()
        for name in ("kv", "attn_backend", "_eager_inputs", "token_ids"):
            self.__dict__.pop(name, None)
        if self.device.type == "cuda":
            clear_cublas_workspaces()
            torch.cuda.empty_cache()

    def _unbind_kv(self) -> None:
        """Take our cache out of the model's layers; another runner's stays."""
        for module, k_cache in zip(self.loaded.attention_modules, self.kv.k_cache, strict=True):
            if module.k_cache is k_cache:
                module.register_buffer("k_cache", None)
                module.register_buffer("v_cache", None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _resolve_device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RunnerError(f"device={name}: this torch sees no CUDA device. Use device=cpu.")
    if device.type != "cuda":
        return device
    current = torch.cuda.current_device()
    # NOTE: fences, stopwatch and kernels work on the current device, and would wait for and time nothing of another's.
    if device.index not in (None, current):
        raise RunnerError(
            f"device={name}: the current device is cuda:{current}. Call torch.cuda.set_device({device.index}) first."
        )
    return torch.device("cuda", current)
