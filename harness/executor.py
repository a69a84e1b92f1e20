"""Runs scheduled steps on the real model: keeps each request's row, tokens and pages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from harness.device import Telemetry
from harness.scheduler_loop import StepResult
from runners.batches import decode_batch, extend_batch
from runners.errors import OutOfPagesError
from runners.stopwatch import create_stopwatch
from runners.token_reader import PendingTokens, TokenReader

if TYPE_CHECKING:
    from harness.scheduler import ScheduledStep
    from harness.workload.base import Request
    from runners.forward_batch import ForwardBatch
    from runners.model_runner import ModelRunner

#: Steps between two looks at the throttle reasons: a look costs more host time than a step may.
_STEPS_PER_LOOK = 64


class _Sequence:
    """A request's tokens: its prompt, and behind it what has been generated."""

    __slots__ = ("num_tokens", "row", "token_ids")

    def __init__(self, token_ids: np.ndarray, num_tokens: int) -> None:
        self.token_ids = token_ids
        self.num_tokens = num_tokens
        self.row: int | None = None


class ModelExecutor:
    """An `Executor` over a `ModelRunner`; prompts are random token ids, seeded per request.

    Decoding is greedy. Tokens, rows and pages are kept by request id; a preempted request gives
    its row and pages back and keeps its tokens, so that its recompute is exact.
    """

    def __init__(self, runner: ModelRunner, seed: int) -> None:
        self._runner = runner
        self._seed = seed
        self._sequences: dict[int, _Sequence] = {}
        self._reader = TokenReader(runner.device, runner.config.max_batch_size)
        self._stopwatch = create_stopwatch(runner.device)
        self._telemetry = Telemetry(runner.device)
        self._throttled: bool | None = None
        self._num_steps = 0

    def launch(self, step: ScheduledStep) -> _Handle:
        """Start `step` and return at once; its tokens are read by the handle's `resolve`."""
        start_ns = time.perf_counter_ns()
        for request in step.admitted:
            self._admit(request)
        batch = self._decode_batch(step) if step.phase == "decode" else self._prefill_batch(step)
        self._runner.stopwatch = self._stopwatch
        output = self._runner.forward(batch)
        self._runner.stopwatch = None
        return _Handle(self, step, self._reader.enqueue(output), start_ns)

    def preempt(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            self._release(self._sequences[request_id])

    def finish(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            self._release(self._sequences.pop(request_id))

    def close(self) -> None:
        """Give back the rows and pages of requests that are still in the system."""
        for sequence in self._sequences.values():
            self._release(sequence)
        self._sequences.clear()

    def generated(self, request_id: int, prompt_len: int) -> np.ndarray:
        """Return the tokens generated so far of a request that is in the system, `[n]` int64."""
        sequence = self._sequences[request_id]
        return sequence.token_ids[prompt_len : sequence.num_tokens].copy()

    def _admit(self, request: Request) -> None:
        sequence = self._sequences.get(request.request_id)
        if sequence is None:
            token_ids = np.empty(request.prompt_len + request.output_len, dtype=np.int64)
            generator = np.random.default_rng((self._seed, request.request_id))
            token_ids[: request.prompt_len] = generator.integers(
                0, self._runner.vocab_size, request.prompt_len
            )
            sequence = self._sequences[request.request_id] = _Sequence(token_ids, request.prompt_len)
        sequence.row = self._runner.kv.add_request()

    def _release(self, sequence: _Sequence) -> None:
        if sequence.row is not None:
            self._runner.kv.release(sequence.row)
            sequence.row = None

    def _decode_batch(self, step: ScheduledStep) -> ForwardBatch:
        sequences = [self._sequences[request_id] for request_id in step.request_ids]
        rows = np.array([sequence.row for sequence in sequences], dtype=np.int32)
        ends = np.array(step.ends, dtype=np.int32)
        # Only a token that opens a page needs one; the scheduler has counted it.
        for index in np.flatnonzero((ends - 1) % self._runner.config.page_size == 0).tolist():
            self._extend(int(rows[index]), int(ends[index]))
        last = [s.token_ids[s.num_tokens - 1] for s in sequences]
        return decode_batch(self._runner.kv, rows, ends, np.array(last, dtype=np.int64))

    def _prefill_batch(self, step: ScheduledStep) -> ForwardBatch:
        sequences = [self._sequences[request_id] for request_id in step.request_ids]
        rows = [sequence.row for sequence in sequences if sequence.row is not None]
        for row, end in zip(rows, step.ends, strict=True):
            self._extend(row, end)
        spans = zip(sequences, step.starts, step.ends, strict=True)
        chunks = [sequence.token_ids[start:end] for sequence, start, end in spans]
        return extend_batch(self._runner.kv, rows, step.starts, chunks)

    def _extend(self, row: int, num_tokens: int) -> None:
        if not self._runner.kv.extend(row, num_tokens):
            raise OutOfPagesError(
                f"row {row} got no page for token {num_tokens}: the scheduler counted on one that the pool "
                "does not have"
            )

    def _resolve(self, step: ScheduledStep, pending: PendingTokens, start_ns: int) -> StepResult:
        token_ids = pending.read()
        step_ms = (time.perf_counter_ns() - start_ns) / 1e6
        for request_id, token_id, is_next in zip(step.request_ids, token_ids, step.yields_token, strict=True):
            if is_next:
                sequence = self._sequences[request_id]
                sequence.token_ids[sequence.num_tokens] = token_id
                sequence.num_tokens += 1
        if step.phase == "prefill":
            return StepResult(
                mode="eager",
                reason="prefill",
                padded_batch_size=step.batch_size,
                num_graphs=0,
                step_ms=step_ms,
                replay_ms=self._stopwatch.elapsed_ms(),
                throttled=self._throttled,
            )
        outcome = self._runner.outcome
        assert outcome is not None
        return StepResult(
            mode=outcome.mode,
            reason=outcome.reason,
            padded_batch_size=outcome.padded_batch_size,
            num_graphs=outcome.num_graphs,
            step_ms=step_ms,
            host_prepare_us=outcome.host_prepare_us,
            # One step at a time: the device waits for all of the preparation.
            host_exposed_us=outcome.host_prepare_us,
            replay_ms=self._stopwatch.elapsed_ms(),
            throttled=self._throttled,
            sizes=outcome.sizes if outcome.num_graphs else (),
        )

    def look_at_clocks(self) -> None:
        """See whether the card throttles, now and then. Call it between steps: it is not the model's time."""
        if self._num_steps % _STEPS_PER_LOOK == 0:
            reasons = self._telemetry.throttle_reasons()
            self._throttled = None if reasons is None else bool(reasons)
        self._num_steps += 1


class _Handle:
    """A launched step of a `ModelExecutor`."""

    def __init__(
        self, executor: ModelExecutor, step: ScheduledStep, pending: PendingTokens, start_ns: int
    ) -> None:
        self._executor = executor
        self._step = step
        self._pending = pending
        self._start_ns = start_ns

    def resolve(self) -> StepResult:
        return self._executor._resolve(self._step, self._pending, self._start_ns)
