"""Runs scheduled steps on the real model: keeps each request's row, tokens and pages."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from harness.host_clock import Arrival, Instant
from harness.known_requests import NO_ROW, KnownRequests
from harness.scheduler_loop import StepResult
from harness.telemetry import Reading, Telemetry, TelemetryWatch
from runners.batches import decode_batch, extend_batch
from runners.errors import OutOfPagesError
from runners.stopwatch import create_stopwatch
from runners.token_reader import PendingTokens, TokenReader

if TYPE_CHECKING:
    from harness.scheduler import ScheduledStep
    from harness.workload.base import Request
    from runners.forward_batch import ForwardBatch
    from runners.model_runner import ModelRunner
    from runners.padding import StepOutcome
    from runners.stopwatch import Stopwatch

#: Steps between two looks at the card: a look costs more host time than a step may.
_STEPS_PER_LOOK = 64


class _Decoding:
    """The requests of the last decode step: most steps have those of the step before, a token longer."""

    __slots__ = ("ends", "lines", "num_kv_tokens", "places", "request_ids", "rows", "unknown")

    def __init__(self, step: ScheduledStep, known: KnownRequests) -> None:
        self.request_ids = step.request_ids
        self.lines = known.lines(step.request_ids)
        self.rows = known.rows[self.lines]
        self.ends = np.array(step.ends, dtype=np.int32)
        self.num_kv_tokens = step.num_kv_tokens
        #: Token ids and sources of a step whose tokens all come from the one in flight.
        self.unknown = np.zeros(step.batch_size, dtype=np.int64)
        self.places = np.arange(step.batch_size, dtype=np.int32)

    def grow_to(self, step: ScheduledStep) -> bool:
        """Become those of `step`, if it has the same requests and each is a token longer; else return False."""
        if (
            self.request_ids is not step.request_ids
            or self.num_kv_tokens + step.batch_size != step.num_kv_tokens
        ):
            return False
        self.ends += 1
        self.num_kv_tokens = step.num_kv_tokens
        return True


class ModelExecutor:
    """An `Executor` over a `ModelRunner`; prompts are random token ids, seeded per request.

    Tokens are chosen as `config.sampling` says, its random numbers from the start. Tokens, rows and pages are
    kept by request id; a preempted request gives its row and pages back and keeps its tokens, so that
    its recompute is exact.

    With two steps in flight a step is prepared and launched while the one before runs. A token that the
    host has not read yet goes from that step to this one on the device.
    """

    def __init__(
        self, runner: ModelRunner, seed: int, max_in_flight: int = 1, telemetry: Telemetry | None = None
    ) -> None:
        self._runner = runner
        runner.sampler.reset()  # as many steps as the phases before took, these tokens do not depend on it
        self._seed = seed
        self._known = KnownRequests(runner.config.max_batch_size, runner.config.max_seq_len)
        assert max_in_flight in (1, 2), "a token comes from the host or from the step before"
        self._reader = TokenReader(runner.device, runner.config.max_batch_size, max_in_flight + 1)
        # Of a step that is resolved, the one before it and the ones in flight.
        self._stopwatches = [create_stopwatch(runner.device) for _ in range(max_in_flight + 2)]
        #: The steps that were launched and not resolved, oldest first.
        self._in_flight: deque[_Handle] = deque()
        self._resolved: Instant | None = None
        self._decoding: _Decoding | None = None
        #: The requests of the last step resolved and the tokens read, if that was a decode step.
        self._last_read: tuple[list[int], np.ndarray] | None = None
        self._watch = TelemetryWatch(telemetry or Telemetry.of(runner.device))
        self._throttled: bool | None = None
        self._num_steps = 0
        #: What `look_at_card` saw.
        self.readings: list[Reading] = []

    def launch(self, step: ScheduledStep) -> _Handle:
        """Start `step` and return at once; its tokens are read by the handle's `resolve`."""
        start = Instant()
        for request in step.admitted:
            self._admit(request)
        batch = self._decode_batch(step) if step.phase == "decode" else self._prefill_batch(step)
        stopwatch = self._stopwatches[step.index % len(self._stopwatches)]
        self._runner.stopwatch = stopwatch
        output = self._runner.forward(batch)
        self._runner.stopwatch = None
        outcome = self._runner.outcome
        assert outcome is not None
        before = self._in_flight[-1].stopwatch if self._in_flight else None
        pending = self._reader.enqueue(output)
        lines, places = self._yielding(step)
        handle = _Handle(self, step, pending, lines, places, start, outcome, stopwatch, before)
        self._in_flight.append(handle)
        return handle

    def preempt(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            self._release(request_id)

    def finish(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            self._release(request_id)
            self._known.remove(request_id)

    def close(self) -> None:
        """Give back the rows and pages of requests that are still in the system."""
        self.finish(self._known.request_ids())
        self._in_flight.clear()

    def generated(self, request_id: int, prompt_len: int) -> np.ndarray:
        """Return the tokens generated so far of a request that is in the system, `[n]` int64."""
        return self._known.tokens(self._known.line(request_id), prompt_len).copy()

    def _admit(self, request: Request) -> None:
        known = self._known
        if request.request_id not in known:
            num_tokens = request.prompt_len + request.output_len
            assert num_tokens <= self._runner.config.max_seq_len, "the scheduler's limits are the runner's"
            generator = np.random.default_rng((self._seed, request.request_id))
            known.add(request.request_id, generator.integers(0, self._runner.vocab_size, request.prompt_len))
        known.rows[known.line(request.request_id)] = self._runner.kv.add_request()

    def _release(self, request_id: int) -> None:
        self._decoding = None
        line = self._known.line(request_id)
        row = int(self._known.rows[line])
        if row != NO_ROW:
            self._runner.kv.release(row)
            self._known.rows[line] = NO_ROW

    def _decode_batch(self, step: ScheduledStep) -> ForwardBatch:
        decoding = self._decoding_of(step)
        rows, ends = decoding.rows, decoding.ends
        if not self._runner.kv.open_pages(rows, ends):
            raise OutOfPagesError(
                f"a decode step of {len(rows)} requests got no pages for its tokens: the scheduler counted on some "
                "that the pool does not have"
            )
        token_ids, source = self._last_tokens(step, decoding)
        return decode_batch(self._runner.kv, rows, ends, token_ids, source)

    def _decoding_of(self, step: ScheduledStep) -> _Decoding:
        if self._decoding is None or not self._decoding.grow_to(step):
            self._decoding = _Decoding(step, self._known)
        return self._decoding

    def _last_tokens(self, step: ScheduledStep, decoding: _Decoding) -> tuple[np.ndarray, np.ndarray | None]:
        """Each request's newest token as far as the host has read it, and the place of a newer one in the tokens of
        the step in flight, -1 for none: `[n]` int64, `[n]` int32 or None."""
        if not self._in_flight:
            if self._last_read is not None and self._last_read[0] is step.request_ids:
                return self._last_read[1], None
            return self._known.newest(decoding.lines), None
        (running,) = self._in_flight
        if running.step.request_ids is step.request_ids:
            return decoding.unknown, decoding.places
        source_of_line = np.full(self._known.num_lines, -1, dtype=np.int32)
        source_of_line[running.lines] = running.places
        source = source_of_line[decoding.lines]
        return self._known.newest(decoding.lines), source

    def _prefill_batch(self, step: ScheduledStep) -> ForwardBatch:
        lines = [self._known.line(request_id) for request_id in step.request_ids]
        rows = self._known.rows[lines].tolist()
        for row, end in zip(rows, step.ends, strict=True):
            self._extend(row, end)
        spans = zip(lines, step.starts, step.ends, strict=True)
        return extend_batch(self._runner.kv, rows, step.starts, [self._known.tokens(*span) for span in spans])

    def _extend(self, row: int, num_tokens: int) -> None:
        if not self._runner.kv.extend(row, num_tokens):
            raise OutOfPagesError(
                f"row {row} got no page for token {num_tokens}: the scheduler counted on one that the pool "
                "does not have"
            )

    def _yielding(self, step: ScheduledStep) -> tuple[np.ndarray, np.ndarray]:
        """Return the lines whose next token the step yields, and where that is in its tokens: `[n]` int64, `[n]`."""
        if step.phase == "decode":
            assert self._decoding is not None
            return self._decoding.lines, self._decoding.places
        places = [place for place, yields_token in enumerate(step.yields_token) if yields_token]
        lines = self._known.lines([step.request_ids[place] for place in places])
        return lines, np.array(places, dtype=np.int64)

    def _resolve(self, handle: _Handle) -> StepResult:
        assert self._in_flight.popleft() is handle, "steps are resolved in the order of their launches"
        step, outcome = handle.step, handle.outcome
        tokens = Arrival(handle.pending)
        # With another step in flight, the pace: from the tokens of the step before to those of this one.
        step_ms = tokens.ms_since(handle.start.or_later(self._resolved))
        self._resolved = tokens
        self._last_read = (step.request_ids, tokens.value) if step.phase == "decode" else None
        self._known.append(handle.lines, tokens.value[handle.places])
        if step.phase == "prefill":
            return StepResult(
                mode="eager",
                reason="prefill",
                padded_batch_size=step.batch_size,
                num_graphs=0,
                step_ms=step_ms,
                replay_ms=handle.stopwatch.elapsed_ms(),
                throttled=self._throttled,
            )
        return StepResult(
            mode=outcome.mode,
            reason=outcome.reason,
            padded_batch_size=outcome.padded_batch_size,
            num_graphs=outcome.num_graphs,
            step_ms=step_ms,
            host_prepare_us=outcome.host_prepare_us,
            host_exposed_us=handle.host_exposed_us(),
            replay_ms=handle.stopwatch.elapsed_ms(),
            throttled=self._throttled,
            sizes=outcome.sizes if outcome.num_graphs else (),
        )

    def look_at_card(self) -> None:
        """Read the card, now and then. Call it between steps: it is not the model's time."""
        if self._num_steps % _STEPS_PER_LOOK == 0 and self._watch.is_due:
            reading = self._watch.look()
            self._throttled = reading.is_throttled
            self.readings.append(reading)
        self._num_steps += 1


@dataclass(eq=False)
class _Handle:
    """A launched step of a `ModelExecutor`."""

    _executor: ModelExecutor
    step: ScheduledStep
    pending: PendingTokens
    #: Whose next token it yields, and where in the tokens that is: `[n]` each.
    lines: np.ndarray
    places: np.ndarray
    start: Instant
    outcome: StepOutcome
    stopwatch: Stopwatch
    #: Of the step that was in flight at the launch, None if there was none.
    before: Stopwatch | None

    def resolve(self) -> StepResult:
        return self._executor._resolve(self)

    def host_exposed_us(self) -> float:
        """Return the host time that the device waited for, in µs.

        With nothing in flight at the launch that is all of the preparation. Else it is what lay on the
        device between the work of the step before and this one's: events, where the graph does not fetch its
        inputs their copies, and whatever the host was late.
        """
        if self.before is None:
            return self.outcome.host_prepare_us
        return max(0.0, self.stopwatch.idle_ms_after(self.before) * 1e3)
