"""DecodeSteps: carries out a decode batch as its plan says, on the static inputs of a graph runner."""

from __future__ import annotations

import time
from dataclasses import replace
from operator import is_
from typing import TYPE_CHECKING

import torch

from runners.captured_addresses import CapturedAddresses, StaticParts
from runners.errors import PlanLayoutError
from runners.forward_batch import ForwardBatch, ForwardMode
from runners.padding import StepPlan
from runners.token_feed import feed_tokens

if TYPE_CHECKING:
    from runners.cuda_graph_runner import CudaGraphRunner

#: The logits of a step, and the ns from its call to its launch.
Prepared = tuple[torch.Tensor, int]


class DecodeSteps:
    """Prepares and launches decode steps: one graph, several in a row, compiled code, or eager.

    Belongs to one capture: it notes where the static tensors lie, and refuses a replay after one of
    them was replaced.

    Args:
        graphs: whose graphs and static inputs these are.
        output: `[max_bs, vocab_size]`, what the graphs write; None where Inductor makes them.
    """

    def __init__(self, graphs: CudaGraphRunner, output: torch.Tensor | None) -> None:
        self._graphs = graphs
        self._runner = graphs.model_runner
        self._output = output
        self._outputs = () if output is None else (output,)
        self._split_output: torch.Tensor | None = None
        #: The buffers of the layer that shows which cache is bound to the model. Straight from its dict: a
        #: module's attribute is looked up in Python.
        self._bound = self._runner.loaded.attention_modules[0]._buffers
        #: The static tensors that were last found where they were. They stay alive as long as the graphs that
        #: read them, so none can be taken for a later one in its place.
        self._seen = self.static_parts()
        self._addresses = CapturedAddresses(self._seen, self.named_static_tensors())

    def run(self, batch: ForwardBatch, plan: StepPlan, started: int) -> Prepared:
        """Run `batch` as `plan` says; `started` is the `perf_counter_ns` of the call.

        Before the launch it looks at who the static tensors are, and at a tuple of them as one: their addresses lie
        scattered over a few hundred cache lines, which cost a step on a cold cache up to 50 µs. These it reads
        once the device is at work; only a tensor that got other storage under its feet waits until then.

        Raises StaleGraphError or PlanLayoutError; see `CudaGraphRunner.replay`.
        """
        if plan.mode == "eager":
            return self._run_eager(batch, plan, started)
        runner, parts = self._runner, self.static_parts()
        if not all(map(is_, parts, self._seen)):
            self._addresses.check(parts, self.named_static_tensors)
            self._seen = parts
        if plan.mode != "compiled" and runner.attn_backend.looks_up_past_only:
            runner.kv.flush_urgent()
        else:
            runner.kv.flush()
        if plan.mode == "graph":
            size = plan.sizes[0]
            prepare_ns = self._replay_part(batch, size, started, wants_ids=True)
            prepared = (self._graphs.output_buffers[size].next_token_logits[: batch.batch_size], prepare_ns)
        elif plan.mode == "split":
            prepared = self._run_split(batch, plan, started)
        else:
            prepared = self._run_compiled(batch, plan, started)
        self._addresses.check(parts, self.named_static_tensors)
        return prepared

    # --- ways to run ---------------------------------------------------------------------------

    def _run_split(self, batch: ForwardBatch, plan: StepPlan, started: int) -> Prepared:
        """Replay the parts in a row. Each one's logits move out before the next one's inputs move in."""
        logits, sampled = self._split_buffer()[: batch.batch_size], self._runner.token_ids
        token_ids = torch.empty_like(sampled[: batch.batch_size])
        known = self._with_known_ids(batch)
        prepare_ns = first = 0
        for index, size in enumerate(plan.sizes):
            end = min(first + size, batch.batch_size)
            try:
                prepare_ns += self._replay_part(known.part(first, end), size, started, starts=index == 0)
            except PlanLayoutError:
                self._put_back_ids(batch, known)
                raise
            logits[first:end].copy_(self._graphs.output_buffers[size].next_token_logits[: end - first])
            token_ids[first:end].copy_(sampled[: end - first])
            first, started = end, time.perf_counter_ns()
        sampled[: batch.batch_size].copy_(token_ids)
        return logits, prepare_ns

    def _with_known_ids(self, batch: ForwardBatch) -> ForwardBatch:
        """Take the ids that the last step sampled before the first part overwrites them."""
        if batch.token_source is None:
            return batch
        device = self._runner.device
        input_ids = batch.input_ids.to(device, copy=True)
        feed_tokens(input_ids, batch.token_source.to(device), self._runner.token_ids)
        return replace(batch, input_ids=input_ids, token_source=None)

    def _put_back_ids(self, batch: ForwardBatch, known: ForwardBatch) -> None:
        """Undo what earlier parts did to the last step's ids: the whole batch is about to run in another way."""
        if batch.token_source is None:
            return
        source = batch.token_source.to(known.input_ids.device)
        is_fed = source >= 0
        self._runner.token_ids[source[is_fed].long()] = known.input_ids[is_fed]

    def _split_buffer(self) -> torch.Tensor:
        if self._split_output is None:
            assert self._output is not None
            rows = max(self._runner.max_running_requests, self._graphs.max_bs)
            # Not an inference tensor, whatever the caller is in: later steps write to it outside of that too.
            with torch.inference_mode(False):
                self._split_output = self._output.new_zeros((rows, self._output.shape[1]))
        return self._split_output

    def _run_compiled(self, batch: ForwardBatch, plan: StepPlan, started: int) -> Prepared:
        """Call the compiled function as it was captured, or as Inductor replays it by itself."""
        size = plan.sizes[0]
        self.prepare(batch, size)
        if self._graphs.poison_padding:
            self._poison(size)
        prepare_ns = time.perf_counter_ns() - started
        static = self._graphs.buffers.static_batch(size)
        if batch.token_source is None:
            static = replace(static, token_source=None)  # nothing to feed: no kernel for it
        logits = self._runner.compute_timed(static, self._graphs.forward_fn(size))
        self.settle()
        if self._graphs.poison_padding:
            self._runner.kv.check_null_page()
        return logits[: batch.batch_size], prepare_ns

    def _run_eager(self, batch: ForwardBatch, plan: StepPlan, started: int) -> Prepared:
        size = plan.sizes[0] if plan.sizes else None
        if size in self._graphs.graphs:
            # What a replay of that size must equal: the same inputs at the same addresses, the same plan.
            self._runner.kv.flush()
            self.prepare(batch, size)
            prepared = self._graphs.buffers.static_batch(size)
        else:
            prepared = self._runner.prepare_eager(batch, size)
        prepare_ns = time.perf_counter_ns() - started
        return self._runner.compute_timed(prepared)[: batch.batch_size], prepare_ns

    # --- parts of a step -----------------------------------------------------------------------

    def _replay_part(
        self, batch: ForwardBatch, size: int, started: int, starts: bool = True, wants_ids: bool = False
    ) -> int:
        """Replay the graph of `size` on `batch`; return the ns from `started` to the launch."""
        stopwatch = self._runner.stopwatch
        self.prepare(batch, size, graph_follows=True, wants_ids=wants_ids)
        if self._graphs.poison_padding:
            self._poison(size)
        prepare_ns = time.perf_counter_ns() - started
        if stopwatch is not None and starts:
            stopwatch.start()
        self._graphs.graphs[size].replay()
        self._graphs.buffers.handover.note_launch()
        if stopwatch is not None:
            stopwatch.stop()
        self.settle()
        if self._graphs.poison_padding:
            self._runner.kv.check_null_page()
        return prepare_ns

    def prepare(
        self, batch: ForwardBatch, size: int, graph_follows: bool = False, wants_ids: bool = False
    ) -> None:
        """Write the inputs, for the graph to fetch if one follows, then plan attention for exactly them.

        See `InputBuffers.populate`.
        """
        buffers, source = self._graphs.buffers, self._runner.attn_backend.replay_plans_from
        buffers.populate(batch, graph_follows, wants_ids, at_once=source == "inputs")
        if source == "nothing" and buffers.is_as_made:
            return
        static = buffers.static_batch(size)
        try:
            self._runner.attn_backend.init_forward_metadata_replay_cuda_graph(
                size,
                static.req_pool_indices,
                static.seq_lens,
                batch.seq_lens_sum + (size - batch.batch_size) * self._graphs.seq_len_fill_value,
                ForwardMode.DECODE,
                buffers.first_seq_lens_cpu(size),
            )
        except PlanLayoutError:
            buffers.handover.take_back()
            raise

    def settle(self) -> None:
        """Record the events of the staging buffers: after the launch the time costs the step nothing."""
        self._graphs.buffers.settle()
        self._runner.kv.settle()
        self._runner.attn_backend.settle()

    def _poison(self, size: int) -> None:
        """Put NaN wherever a correct step must not look, and where it must write."""
        kv = self._runner.kv
        kv.poison_unallocated()
        if self._runner.attn_backend.masks_tail:
            kv.poison_tails()
        if size in self._graphs.output_buffers:
            self._graphs.output_buffers[size].next_token_logits.fill_(float("nan"))

    # --- what the graphs hold on to ------------------------------------------------------------

    def static_parts(self) -> StaticParts:
        """Return everything that the graphs read or write and that they do not own, as its owners have it now."""
        runner, kv = self._runner, self._runner.kv
        return (
            self._outputs,
            self._graphs.buffers.packed,
            runner.token_ids,
            self._bound["k_cache"],
            kv.table.page_table,
            kv.k_cache,
            kv.v_cache,
            runner.attn_backend.captured_parts,
        )

    def named_static_tensors(self) -> dict[str, torch.Tensor]:
        """Return the same tensors by name."""
        runner = self._runner
        output = {} if self._output is None else {"output": self._output}
        names = runner.attn_backend.captured_tensors() | runner.kv.captured_tensors()
        inputs = {"input buffers": self._graphs.buffers.packed, "sampled token ids": runner.token_ids}
        bound = self._bound["k_cache"]
        cache = {} if bound is None else {"the cache bound to the model": bound}
        return {**output, **inputs, **cache, **names}
