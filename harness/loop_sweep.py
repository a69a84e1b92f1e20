"""What steps cost in the scheduler's loop, beside each other: the host's share, and prefill chunks.

A size sweep repeats one prepared step. In the loop a decode step follows a prefill or another decode step,
its batch is put together anew, and the scheduler decides in between. So the real scheduler and executor
serve made requests whose steps are known beforehand: a fixed batch that decodes, and visitors that are
prefilled beside it, in chunks of every size and after every context to be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.clock import CostClock
from harness.executor import ModelExecutor
from harness.scheduler import SchedulerLimits, SchedulerPolicy
from harness.scheduler_loop import run_loop
from harness.workload.base import Workload

if TYPE_CHECKING:
    from harness.scheduler import ScheduledStep
    from harness.scheduler_loop import RequestRow, StepResult, StepRow
    from runners.model_runner import ModelRunner

#: Prompt of a request of the fixed batch.
_PROMPT_LEN = 32
#: Decode steps between two visitors' chunks: one that follows the prefill, and some that follow a decode step.
_DECODES_BETWEEN = 3
#: Visitors a batch size, and of each length.
_NUM_VISITORS, _NUM_REPEATS = 24, 8
#: Samples of a kind that are left out: caches and clocks settle.
_NUM_WARMUP = 2


class _LapClock(CostClock):
    """Every step counts as one millisecond; `lap_ms` is what it really took, from launch to launch."""

    is_measured = True

    def __init__(self) -> None:
        super().__init__(lambda step, result: 1.0)
        self.lap_ms = 0.0

    def advance(self, step: ScheduledStep, result: StepResult, measured_ms: float) -> float:
        self.lap_ms = measured_ms
        return super().advance(step, result, measured_ms)


class LoopSweep:
    """Times loops and hands rows of `loop.csv` to `on_row`; what the pool does not hold is left out."""

    def __init__(
        self,
        runner: ModelRunner,
        limits: SchedulerLimits,
        batch_sizes: Sequence[int],
        prefill_tokens: Sequence[int],
        context_lens: Sequence[int],
        seed: int,
    ) -> None:
        self._runner, self._limits, self._seed = runner, limits, seed
        self._batch_sizes = sorted({min(size, limits.max_batch_size - 1) for size in batch_sizes} - {0})
        chunk = limits.prefill_chunk_tokens
        self._chunks = sorted({min(tokens, chunk) for tokens in prefill_tokens})
        # A prompt is cut into whole chunks and a rest, which follows a whole number of chunks.
        cached = sorted({length // chunk * chunk for length in context_lens} | {0})
        longest = min(limits.max_seq_len, limits.num_pages * limits.page_size // 2)
        long_chunks = {self._chunks[len(self._chunks) // 2], self._chunks[-1]}
        self._prompts = [
            start + tokens
            for start in cached
            for tokens in self._chunks
            if start + tokens < longest and (start == 0 or tokens in long_chunks)
        ]

    def run(self, moment: str, on_row: Callable[[dict[str, Any]], None]) -> None:
        """Time a loop for each batch size, and one with prompts of every kind."""
        for batch_size in self._batch_sizes:
            visitors = [self._chunks[len(self._chunks) // 2]] * _NUM_VISITORS
            self._run(moment, batch_size, visitors, "decode", on_row)
        self._run(moment, 1, self._prompts * _NUM_REPEATS, "prefill", on_row)

    def _run(
        self,
        moment: str,
        batch_size: int,
        visitors: list[int],
        phase: str,
        on_row: Callable[[dict[str, Any]], None],
    ) -> None:
        workload = self._workload(batch_size, visitors)
        limits = replace(self._limits, max_batch_size=batch_size + 1)
        num_pages = batch_size * limits.pages_for(int(workload.prompt_len[0] + workload.output_len[0]))
        if num_pages + limits.pages_for(max(visitors) + 1) + batch_size > limits.num_pages:
            return
        clock, kinds = _LapClock(), _Kinds(batch_size, phase)
        executor = ModelExecutor(self._runner, self._seed)

        def on_step(row: StepRow) -> None:
            kinds.add(row, clock.lap_ms)

        def on_request(row: RequestRow) -> None:
            pass

        try:
            run_loop(SchedulerPolicy(limits), executor, clock, workload, on_step, on_request)
        finally:
            executor.close()
        for row in kinds.rows():
            on_row({"moment": moment, "graph_backend": self._backend(row["mode"]), **row})

    def _workload(self, batch_size: int, visitors: list[int]) -> Workload:
        """The fixed batch at once; when all of it decodes, one visitor after the other, of one token each."""
        chunk = self._limits.prefill_chunk_tokens
        filled = 2 * -(-batch_size * _PROMPT_LEN // chunk) + 2
        turns = [2 * -(-prompt // chunk) + _DECODES_BETWEEN for prompt in visitors]
        arrival = [0] * batch_size + (filled + np.cumsum([0, *turns[:-1]])).tolist()
        output_len = min(filled + sum(turns) + 1, self._limits.max_seq_len - _PROMPT_LEN)
        return Workload(
            np.array(arrival, dtype=np.float64) / 1e3,
            np.array([_PROMPT_LEN] * batch_size + visitors, dtype=np.int32),
            np.array([output_len] * batch_size + [1] * len(visitors), dtype=np.int32),
        )

    def _backend(self, mode: str) -> str:
        return "none" if mode == "eager" else self._runner.graph_backend


class _Kinds:
    """The steps of a loop by what they are and what they follow."""

    def __init__(self, batch_size: int, phase: str) -> None:
        self._batch_size, self._phase = batch_size, phase
        self._previous: str | None = None
        self._steps: dict[tuple[str, int, int], list[tuple[StepRow, float]]] = {}

    def add(self, row: StepRow, lap_ms: float) -> None:
        previous, self._previous = self._previous, row["phase"]
        if row["phase"] != self._phase or previous is None:
            return
        is_decode = row["phase"] == "decode"
        if row["batch_size"] != (self._batch_size if is_decode else 1):
            return  # the fixed batch is not complete
        cached = 0 if is_decode else row["num_kv_tokens"] - row["num_tokens"]
        self._steps.setdefault((previous, row["num_tokens"], cached), []).append((row, lap_ms))

    def rows(self) -> list[dict[str, Any]]:
        """Summarise each kind that has samples left after its warm-up."""
        return [
            self._row(previous, num_tokens, cached, steps[_NUM_WARMUP:])
            for (previous, num_tokens, cached), steps in sorted(self._steps.items())
            if len(steps) > _NUM_WARMUP
        ]

    def _row(
        self, previous: str, num_tokens: int, cached: int, steps: list[tuple[StepRow, float]]
    ) -> dict[str, Any]:
        first = steps[0][0]
        pace_ms = np.array([lap_ms for _, lap_ms in steps])
        host_ms = np.array([lap_ms - (row["replay_ms"] or 0.0) for row, lap_ms in steps])
        prepare_us = [row["host_prepare_us"] for row, _ in steps if row["host_prepare_us"] is not None]
        return {
            "phase": self._phase,
            "previous": previous,
            "mode": first["mode"],
            "batch_size": first["batch_size"],
            "padded_batch_size": first["padded_batch_size"],
            "num_tokens": num_tokens,
            "num_cached_tokens": cached,
            "num_samples": len(steps),
            "pace_ms_p50": float(np.median(pace_ms)),
            "pace_ms_mean": float(pace_ms.mean()),
            "host_ms_p50": float(np.median(host_ms)),
            "host_ms_mean": float(host_ms.mean()),
            "host_prepare_us_p50": float(np.median(prepare_us)) if prepare_us else None,
        }
