"""Drives the scheduler: requests in, `schedule -> launch -> StepHandle -> resolve`, rows out.

Time is the clock's. The loop measures each step from launch to launch on the host, the scheduler's own
work included and the recording of rows left out, and lets the clock decide what that is worth.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict

from harness.clock import Clock
from harness.latencies import Latencies, LatencySummary
from harness.scheduler import Phase, ScheduledStep, SchedulerPolicy, check_request
from harness.token_times import TokenTimes
from harness.workload.base import Request, Workload

#: Rows that a loop with several steps in flight keeps before it lets the steps run out to record them.
_MAX_UNRECORDED_ROWS = 256


@dataclass(frozen=True, slots=True)
class StepResult:
    """How a step ran. What was not measured is None."""

    #: `graph`, `split`, `eager` or `compiled`, and the reason in a word (empty: nothing special).
    mode: str
    reason: str
    #: Rows computed, padding included; for prefill the number of requests.
    padded_batch_size: int
    num_graphs: int
    #: From the call until the sampled token ids could be read.
    step_ms: float
    host_prepare_us: float | None = None
    #: Host time during which the device had nothing to do.
    host_exposed_us: float | None = None
    replay_ms: float | None = None
    throttled: bool | None = None
    #: Rows of each part of a step that ran graphs, padding included; empty for other steps.
    sizes: tuple[int, ...] = ()


class StepHandle(Protocol):
    """A launched step."""

    def resolve(self) -> StepResult:
        """Wait until the step's token ids can be read, keep them, and say how the step ran."""
        ...


class Executor(Protocol):
    """Runs scheduled steps on a model; owns rows, pages, prompts and generated tokens by request id.

    With N steps in flight, `launch` is called before the previous step is resolved: a decoding request's
    newest token may still be on the device. A request is never scheduled beyond its last token, and
    never admitted again while one of its steps is in flight.
    """

    def launch(self, step: ScheduledStep) -> StepHandle:
        """Start `step`, after taking rows for `step.admitted`."""
        ...

    def preempt(self, request_ids: Sequence[int]) -> None:
        """Give back rows and pages, and keep the generated tokens: the requests will be recomputed."""
        ...

    def finish(self, request_ids: Sequence[int]) -> None:
        """Give back rows and pages of answered requests, and forget them."""
        ...


class StepRow(TypedDict):
    """A row of steps.parquet. `clock_ms` is the time at which the step's tokens could be read.

    A clock that does not measure leaves nothing measured in a row, so that two replays give equal files:
    `step_ms` is what the clock charged, and the other times and `throttled` are None.
    """

    step: int
    clock_ms: float
    phase: Phase
    mode: str
    reason: str
    batch_size: int
    padded_batch_size: int
    num_graphs: int
    num_tokens: int
    num_kv_tokens: int
    host_prepare_us: float | None
    host_exposed_us: float | None
    replay_ms: float | None
    step_ms: float
    throttled: bool | None
    #: Tokens of the longest request of the step.
    longest_len: int


class RequestRow(TypedDict):
    """A row of requests.parquet; latencies count from `sent_s`, when `max_concurrency` let it be sent."""

    request_id: int
    arrival_s: float
    sent_s: float
    prompt_len: int
    output_len: int
    ttft_ms: float
    #: None for a request of one output token.
    tpot_ms: float | None
    e2el_ms: float
    num_preemptions: int
    status: str


class _Sent:
    """A request that is in the system."""

    __slots__ = ("num_preemptions", "request", "sent_ms")

    def __init__(self, request: Request, sent_ms: float) -> None:
        self.request = request
        self.sent_ms = sent_ms
        self.num_preemptions = 0


class _Lap:
    """Host time between laps, less what passed while it was paused."""

    def __init__(self, timer_ns: Callable[[], int]) -> None:
        self._timer_ns = timer_ns
        self._start_ns = timer_ns()

    def restart(self) -> None:
        self._start_ns = self._timer_ns()

    def lap_ms(self) -> float:
        now_ns = self._timer_ns()
        elapsed_ms = (now_ns - self._start_ns) / 1e6
        self._start_ns = now_ns
        return elapsed_ms


def run_loop(
    policy: SchedulerPolicy,
    executor: Executor,
    clock: Clock,
    workload: Workload,
    on_step: Callable[[StepRow], object],
    on_request: Callable[[RequestRow], object],
    max_in_flight: int = 1,
    timer_ns: Callable[[], int] = time.perf_counter_ns,
) -> LatencySummary:
    """Replay `workload` to the end and return its latencies; each request is answered exactly once.

    `on_step` and `on_request` receive a row for each step and each answered request, in order. They are
    called while nothing is in flight, and their time is not counted. Raises ValueError, before anything
    runs, for a request that could never run under the policy's limits.
    """
    loop = _ReplayLoop(policy, executor, clock, workload, max_in_flight)
    return loop.run(on_step, on_request, _Lap(timer_ns))


class _ReplayLoop:
    """One replay: the phases of an iteration stand in the order in which they run."""

    def __init__(
        self,
        policy: SchedulerPolicy,
        executor: Executor,
        clock: Clock,
        workload: Workload,
        max_in_flight: int,
    ) -> None:
        self._policy = policy
        self._executor = executor
        self._clock = clock
        self._workload = workload
        self._max_in_flight = max_in_flight
        self._in_flight: deque[tuple[ScheduledStep, StepHandle]] = deque()
        self._sent: dict[int, _Sent] = {}
        self._num_sent = 0
        #: Times at which a place in the system became free; None without max_concurrency.
        limit = workload.max_concurrency
        self._free_places_ms = None if limit is None else deque([0.0] * limit)
        self._token_times = TokenTimes(len(workload))
        self._latencies = Latencies()
        self._step_rows: list[StepRow] = []
        self._request_rows: list[RequestRow] = []

    def run(
        self,
        on_step: Callable[[StepRow], object],
        on_request: Callable[[RequestRow], object],
        lap: _Lap,
    ) -> LatencySummary:
        self._check_longest_request()
        lap.restart()
        while True:
            self._send_arrived()
            self._launch()
            if self._in_flight:
                step, result, finished = self._resolve()
                now_ms = self._clock.advance(step, result, lap.lap_ms())
                self._account(step, result, finished, now_ms)
            elif (next_ms := self._next_sending_ms()) is None:
                break
            else:
                self._clock.jump_to(next_ms)
            if not self._in_flight:
                self._record(on_step, on_request)
                lap.restart()
        assert not self._policy.has_work and not self._sent, "a request was lost"
        return self._latencies.summary()

    def _check_longest_request(self) -> None:
        num_tokens = self._workload.prompt_len.astype("int64") + self._workload.output_len
        check_request(self._policy.limits, self._workload.request(int(num_tokens.argmax())))

    def _next_sending_ms(self) -> float | None:
        """When the next request will be sent; None if there is none, or no place for it."""
        if self._num_sent == len(self._workload):
            return None
        arrival_ms = float(self._workload.arrival_s[self._num_sent]) * 1e3
        if self._free_places_ms is None:
            return arrival_ms
        return max(arrival_ms, self._free_places_ms[0]) if self._free_places_ms else None

    def _send_arrived(self) -> None:
        while (sent_ms := self._next_sending_ms()) is not None and sent_ms <= self._clock.now_ms:
            request = self._workload.request(self._num_sent)
            self._policy.add(request)
            self._sent[request.request_id] = _Sent(request, sent_ms)
            self._latencies.add_sending(sent_ms)
            self._num_sent += 1
            if self._free_places_ms is not None:
                self._free_places_ms.popleft()

    def _launch(self) -> None:
        while len(self._in_flight) < self._max_in_flight and len(self._step_rows) < _MAX_UNRECORDED_ROWS:
            step = self._policy.schedule()
            if step is None:
                return
            if step.preempted:
                self._executor.preempt(step.preempted)
                for request_id in step.preempted:
                    self._sent[request_id].num_preemptions += 1
            self._in_flight.append((step, self._executor.launch(step)))

    def _resolve(self) -> tuple[ScheduledStep, StepResult, list[int]]:
        step, handle = self._in_flight.popleft()
        result = handle.resolve()
        finished = self._policy.complete(step)
        if finished:
            self._executor.finish(finished)
        return step, result, finished

    def _account(self, step: ScheduledStep, result: StepResult, finished: list[int], now_ms: float) -> None:
        num_tokens, gaps_ms = self._token_times.add(step, now_ms)
        self._latencies.add_tokens(now_ms, num_tokens, gaps_ms)
        self._step_rows.append(_step_row(step, result, self._clock))
        for request_id in finished:
            self._answer(self._sent.pop(request_id), now_ms)

    def _answer(self, sent: _Sent, now_ms: float) -> None:
        row = _request_row(sent, float(self._token_times.first_ms[sent.request.request_id]), now_ms)
        self._request_rows.append(row)
        self._latencies.add_request(row, sent.sent_ms, now_ms)
        if self._free_places_ms is not None:
            self._free_places_ms.append(now_ms)

    def _record(
        self, on_step: Callable[[StepRow], object], on_request: Callable[[RequestRow], object]
    ) -> None:
        for step_row in self._step_rows:
            on_step(step_row)
        for request_row in self._request_rows:
            on_request(request_row)
        self._step_rows.clear()
        self._request_rows.clear()


def _step_row(step: ScheduledStep, result: StepResult, clock: Clock) -> StepRow:
    is_measured = clock.is_measured
    return {
        "step": step.index,
        "clock_ms": clock.now_ms,
        "phase": step.phase,
        "mode": result.mode,
        "reason": result.reason,
        "batch_size": step.batch_size,
        "padded_batch_size": result.padded_batch_size,
        "num_graphs": result.num_graphs,
        "num_tokens": step.num_tokens,
        "num_kv_tokens": step.num_kv_tokens,
        "host_prepare_us": result.host_prepare_us if is_measured else None,
        "host_exposed_us": result.host_exposed_us if is_measured else None,
        "replay_ms": result.replay_ms if is_measured else None,
        "step_ms": result.step_ms if is_measured else clock.step_ms,
        "throttled": result.throttled if is_measured else None,
        "longest_len": max(step.ends),
    }


def _request_row(sent: _Sent, first_token_ms: float, now_ms: float) -> RequestRow:
    request = sent.request
    num_gaps = request.output_len - 1
    return {
        "request_id": request.request_id,
        "arrival_s": request.arrival_s,
        "sent_s": sent.sent_ms / 1e3,
        "prompt_len": request.prompt_len,
        "output_len": request.output_len,
        "ttft_ms": first_token_ms - sent.sent_ms,
        "tpot_ms": (now_ms - first_token_ms) / num_gaps if num_gaps else None,
        "e2el_ms": now_ms - sent.sent_ms,
        "num_preemptions": sent.num_preemptions,
        "status": "ok",
    }
