"""CudaGraphRunner: captures decode graphs for a list of batch sizes, and replays them.

Attention is planned on the host before each replay, into the addresses that the graph reads; the
plan is not recorded in the graph (FlashInfer plans on the host).
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from runners.capture import CaptureRecord, CompileCost, Forward, StepCapturer, capture_error
from runners.capture_mode import freeze_gc, is_capture_mode, model_capture_mode
from runners.decode_steps import DecodeSteps
from runners.errors import NoUsableGraphError, PlanLayoutError, RunnerError
from runners.forward_batch import (
    DECODE_OR_IDLE,
    NUM_TOKENS_PER_BS,
    ForwardBatch,
    ForwardMode,
    LogitsProcessorOutput,
)
from runners.graph_backend import DecodeGraph, create_graph, side_stream
from runners.graph_pool import (
    acquire_graph_pool,
    clear_cublas_workspaces,
    get_global_graph_memory_pool,
    release_graph_pool,
    set_global_graph_memory_pool,
)
from runners.input_buffers import InputBuffers
from runners.models.head_output import output_head
from runners.padding import StepCosts, StepOutcome, StepPlan
from runners.step_policy import StepLog, StepPolicy

if TYPE_CHECKING:
    from runners.compilation import CompiledModel
    from runners.model_runner import ModelRunner

__all__ = [
    "CudaGraphRunner",
    "freeze_gc",
    "get_global_graph_memory_pool",
    "is_capture_mode",
    "model_capture_mode",
    "set_global_graph_memory_pool",
]


class CudaGraphRunner:
    """Owns the decode graphs of a model runner. Captures on construction.

    Logits that `replay` returns are a view of the shared output (or of the split's own buffer): valid
    until the next replay of *any* graph. `copy_output` returns copies instead.

    Attributes:
        graphs: captured size → graph.
        output_buffers: captured size → its view of the one output buffer.
        capture_bs: captured sizes, sorted; `compile_bs` are those of them that are compiled.
        compiled: the compiled model, or None. With compile mode `reduce_overhead` Inductor makes graphs of
            its own: `graphs` and `output_buffers` stay empty, and the steps run in mode `compiled`.
        max_bs: the largest captured size.
        seq_len_fill_value: length of a padding row, as the attention backend declares it.
        buffers: the static inputs.
        capture_records: a `CaptureRecord` per captured size, in the order of the captures.
        poison_padding, copy_output: may be switched between steps.
    """

    def __init__(self, model_runner: ModelRunner) -> None:
        config = model_runner.config
        self.model_runner = model_runner
        self.device = model_runner.device
        self.capture_bs = sorted(config.capture_sizes)
        self.enable_torch_compile = config.compile_mode != "none"
        self.max_bs = self.capture_bs[-1]
        self.compile_bs = list(config.compile_sizes)
        self.torch_compile_max_bs = max(self.compile_bs, default=0)
        self.poison_padding = config.poison_padding
        self.copy_output = config.copy_output
        model_runner.attn_backend.init_cuda_graph_state(self.max_bs, self.max_bs * NUM_TOKENS_PER_BS)
        self.seq_len_fill_value = model_runner.attn_backend.get_cuda_graph_seq_len_fill_value()
        self.buffers = InputBuffers(self.max_bs, self.seq_len_fill_value, self.device)
        self.graphs: dict[int, DecodeGraph] = {}
        self.output_buffers: dict[int, LogitsProcessorOutput] = {}
        self.capture_records: list[CaptureRecord] = []
        self.compiled = self._compiled_model()
        self._runs_inductor = self.compiled is not None and self.compiled.makes_graphs
        self.graph_backend = "inductor" if self._runs_inductor else create_graph(self.device).backend
        self._policy = StepPolicy(
            self.capture_bs,
            padding=config.padding,
            above_max=config.above_max,
            on_miss=config.on_miss,
            graph_backend=self.graph_backend,
            compile_bs=self.compile_bs,
        )
        self._log = StepLog(self._policy)
        self._steps: DecodeSteps | None = None
        self._is_shut_down = False
        self._size_in_progress = self.max_bs
        try:
            self.capture()
        except BaseException:
            if self.compiled is not None:
                self.compiled.close()
            raise

    def _compiled_model(self) -> CompiledModel | None:
        if not self.enable_torch_compile:
            return None
        from runners.compilation import CompiledModel  # takes seconds to import

        return CompiledModel(self.model_runner.loaded, self.model_runner.config, len(self.compile_bs))

    # --- capture -------------------------------------------------------------------------------

    def capture(self) -> None:
        """Capture a graph for every size in `capture_bs`, largest first. Earlier graphs are dropped.

        Largest first, so that smaller graphs find room in what the largest left in the pool. All sizes to
        be compiled are compiled before the first capture, and what that leaves behind is collected.

        Raises:
            CaptureOutOfMemoryError: with the size reached, the bytes missing and three remedies.
            CaptureError: any other failure. Nothing of a failed capture is left behind: its graphs and
                outputs are freed, the stream is not capturing, and the process can capture again.
        """
        if self._is_shut_down:
            raise RunnerError("the runner was shut down: make a new CudaGraphRunner.")
        self._drop_graphs()
        self.capture_records = []
        try:
            self._warm_up_eager()
            with model_capture_mode(), side_stream(self.device):
                self._capture_all()
        except Exception as error:
            typed = capture_error(error, self._size_in_progress)
            with suppress(RuntimeError):  # a broken CUDA context fails here again; the first error counts
                self._drop_graphs()
            if typed is error:
                raise
            raise typed from error
        except BaseException:
            self._drop_graphs()
            raise

    def _warm_up_eager(self) -> None:
        """Run padding rows eagerly: what that leaves, kernels and a cuBLAS workspace, no size is charged for."""
        # What is left of an earlier step would be written into the pages of its requests.
        self.buffers.populate(ForwardBatch.idle())
        if self.device.type == "cuda":
            batch = self.buffers.static_batch(self.capture_bs[0])
            self.model_runner.attn_backend.init_forward_metadata(batch)
            self.model_runner.compute_logits(batch)

    def _capture_all(self) -> None:
        runner, config = self.model_runner, self.model_runner.config
        pool = None if self._runs_inductor else acquire_graph_pool(self, self.graph_backend)
        dump_dir = None if config.graph_dump_dir is None else Path(config.graph_dump_dir)
        head, generator = output_head(runner.model), runner.sampler.generator
        capturer = StepCapturer(
            self.device,
            pool,
            config.num_warmup_steps,
            dump_dir,
            head,
            generator,
            compiles_head=config.compile_scope == "model",
        )
        runner.kv.zero_null_page()
        costs = self._compile_all(capturer)
        with freeze_gc():
            for size in reversed(self.capture_bs):
                self._size_in_progress = size
                record = self._capture_size(capturer, size, costs.get(size))
                self.capture_records.append(record)
                if runner.on_capture is not None:
                    runner.on_capture(record)
        self._steps = DecodeSteps(self, capturer.output)
        # The warm-ups drew random numbers too.
        runner.sampler.reset()
        # The warm-up wrote the null page; what it left must not reach a later step.
        runner.kv.check_null_page()
        runner.kv.zero_null_page()

    def _compile_all(self, capturer: StepCapturer) -> dict[int, CompileCost]:
        """Compile the sizes in `compile_bs`, largest first; return what each took."""
        costs: dict[int, CompileCost] = {}
        for size in reversed(self.compile_bs):
            assert self.compiled is not None
            self._size_in_progress = size
            batch = self.buffers.static_batch(size)
            # The code that is compiled knows nothing of the attention plan, so an eager one will do.
            self.model_runner.attn_backend.init_forward_metadata(batch)
            with self.compiled.compiling():
                costs[size] = capturer.compile(batch, self.forward_fn(size))
            if self.model_runner.on_compile is not None:
                self.model_runner.on_compile(size, costs[size])
        return costs

    def _capture_size(self, capturer: StepCapturer, size: int, cost: CompileCost | None) -> CaptureRecord:
        batch = self.buffers.static_batch(size)
        self.model_runner.attn_backend.init_forward_metadata_capture_cuda_graph(
            size, size * NUM_TOKENS_PER_BS, batch.req_pool_indices, batch.seq_lens, ForwardMode.DECODE
        )
        if self._runs_inductor:
            assert cost is not None
            return capturer.warm_up_inductor(batch, self.forward_fn(size), cost)
        self.graphs[size], output, record = capturer.capture(batch, self._step_fn(size), cost)
        self.output_buffers[size] = LogitsProcessorOutput(output, self.model_runner.token_ids[:size])
        return record

    def forward_fn(self, size: int) -> Forward:
        """Return the function to capture for `size`: static batch → logits `[size, vocab_size]`."""
        if size in self.compile_bs:
            return self._compute_compiled
        return self.model_runner.compute_logits

    def _step_fn(self, size: int) -> Forward:
        """Return all that a graph of `size` does: fetch its inputs, compute, hand out the ids."""
        handover, forward = self.buffers.handover, self.forward_fn(size)
        token_ids = self.model_runner.token_ids[:size]
        if not handover.is_captured:
            return forward

        def step(batch: ForwardBatch) -> torch.Tensor:
            handover.fetch()
            logits = forward(batch)
            handover.post(token_ids)
            return logits

        return step

    def _compute_compiled(self, batch: ForwardBatch) -> torch.Tensor:
        return self.model_runner.compute_logits(batch, self.compiled)

    # --- choosing ------------------------------------------------------------------------------

    def set_step_costs(self, costs: StepCosts | None) -> None:
        """Hand measured costs to the strategies that need them; None takes them away.

        Raises RunnerError if they were measured on another graph backend than this runner's.
        """
        self._policy.set_costs(costs)

    def plan(self, batch_size: int) -> StepPlan:
        """Return how a decode batch of `batch_size` runs under the strategy and policies in force.

        Raises NoUsableGraphError where `above_max` or `on_miss` is `error`.
        """
        return self._policy.plan(batch_size)

    def refuses(self, batch_size: int) -> bool:
        """Return True if a decode batch of `batch_size` is an error under the policies in force."""
        return self._policy.refuses(batch_size)

    def can_run(self, forward_batch: ForwardBatch) -> bool:
        """Return True if `replay` would use graphs for this batch."""
        if not self.graphs or not forward_batch.forward_mode.is_decode_or_idle():
            return False
        try:
            return self.plan(forward_batch.batch_size).num_graphs > 0
        except NoUsableGraphError:
            return False

    def is_compiled(self, plan: StepPlan) -> bool:
        """Return True if each part of a step that runs as `plan` runs compiled code."""
        return self._policy.runs_compiled(plan)

    @property
    def outcome(self) -> StepOutcome | None:
        """How the last step ran; None before the first."""
        return self._log.outcome

    @property
    def outcome_counts(self) -> Counter[tuple[str, str]]:
        """Steps by (mode, reason)."""
        return self._log.counts

    @property
    def warnings(self) -> list[str]:
        """What was warned about, once per reason, and what went wrong with compiled steps so far."""
        compiled = None if self.compiled is None else self.compiled.counts.warning
        return [*self._log.warnings.values(), *([compiled] if compiled else [])]

    # --- replay --------------------------------------------------------------------------------

    def replay(self, forward_batch: ForwardBatch, plan: StepPlan | None = None) -> LogitsProcessorOutput:
        """Run a decode or idle batch and return its logits, `[batch_size, vocab_size]`.

        `plan` forces a way to run: a graph at a captured size, a split, eager padded to a size (the same
        static inputs and attention plan as that size's graph, if it is captured), or plain eager.

        Raises:
            StaleGraphError: the KV cache, a static buffer or an attention buffer was replaced.
            NoUsableGraphError: no graph fits and the policy is `error`.
            PlanLayoutError: the attention plan differs in layout from the captured one, and the plan
                was forced or `on_miss` is `error`; otherwise the step runs eager.
            RunnerError: not a decode batch, an impossible plan, or after `shutdown`.
        """
        started = time.perf_counter_ns()
        if self._steps is None:
            raise RunnerError("the runner has no graphs: it was shut down, or its last capture failed.")
        if forward_batch.forward_mode not in DECODE_OR_IDLE:
            raise RunnerError(
                f"a {forward_batch.forward_mode.value} batch has no graph: run it with ModelRunner.forward."
            )
        batch_size, is_forced = forward_batch.batch_size, plan is not None
        plan = self._policy.plan(batch_size) if plan is None else self._policy.check_forced(batch_size, plan)
        try:
            logits, prepare_ns = self._steps.run(forward_batch, plan, started)
        except PlanLayoutError:
            if is_forced or self.model_runner.config.on_miss == "error":
                raise
            plan = StepPlan("eager", (), "plan_layout")
            logits, prepare_ns = self._steps.run(forward_batch, plan, started)
        self._log.add(batch_size, plan, prepare_ns)
        token_ids = self.model_runner.token_ids[:batch_size]
        handover = self.buffers.handover
        posted = handover.answer(batch_size) if plan.mode == "graph" and handover.is_captured else None
        if self.copy_output:
            return LogitsProcessorOutput(logits.clone(), token_ids.clone(), posted_token_ids=posted)
        return LogitsProcessorOutput(logits, token_ids, posted_token_ids=posted)

    # --- end -----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Free the graphs, the inputs, the outputs and the pool. The runner cannot replay afterwards."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        if self.compiled is not None:
            self.compiled.close()
        self._drop_graphs()
        del self.buffers

    def _drop_graphs(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for graph in self.graphs.values():
            graph.reset()
        self.graphs.clear()
        self.output_buffers.clear()
        self._steps = None
        release_graph_pool(self)
        if self.device.type == "cuda":
            clear_cublas_workspaces()
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
