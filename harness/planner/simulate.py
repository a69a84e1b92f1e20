"""Replays any trace against measured step times, without a GPU: step time feeds back into batch size.

The policy is `SchedulerPolicy`'s, run by the compiled kernel; prefill, preemption and a limit on
concurrency included. Requests are streamed, so memory does not grow with the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from harness.planner import kernel_state as kn
from harness.planner.kernel import advance
from harness.planner.simulation import Simulation
from harness.scheduler import check_request
from harness.workload.base import Request, Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.planner.step_times import StepTimes
    from harness.scheduler import SchedulerLimits

#: Requests handed to the kernel at once.
_CHUNK_REQUESTS = 1 << 17
_MAX_RECORDS = 1 << 14
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One step: the fields of a row of steps.parquet that the policy decides."""

    phase: str
    batch_size: int
    num_tokens: int
    num_kv_tokens: int
    #: Time after the step.
    clock_ns: int


def simulate(
    times: StepTimes,
    limits: SchedulerLimits,
    workload: Workload | Iterable[Workload],
    *,
    num_windows: int = 1,
    span_s: float | None = None,
    slo_ms: Mapping[str, float] | None = None,
    on_step: Callable[[SimulatedStep], object] | None = None,
) -> Simulation:
    """Serve every request of `workload` once and return what the steps add up to.

    Args:
        times: what a step costs under the capture list in question; its batch sizes must reach
            `limits.max_batch_size`, its prefill times `limits.prefill_chunk_tokens`.
        workload: requests in the order of arrival, whole or in consecutive parts of a longer trace.
        num_windows: equal parts of the time of the arrivals for which histograms are kept apart.
        span_s: the time of the arrivals, needed for windows when the workload comes in parts.
        slo_ms: limits on `ttft`, `tpot` and `e2el` that make an answer a good one.
        on_step: receives every step, in order. Slow: for tests and small traces.

    Raises ValueError for a request that could never run, and for an unknown latency in `slo_ms`.
    """
    parts = iter([workload]) if isinstance(workload, Workload) else iter(workload)
    first = next(parts)
    if span_s is None and isinstance(workload, Workload):
        span_s = float(workload.arrival_s[-1])
    if num_windows > 1 and not span_s:
        raise ValueError("windows need a time over which requests arrive: give span_s, or num_windows=1")
    window_ns = max(1, round(span_s * 1e9 / num_windows)) if num_windows > 1 and span_s else _NEVER
    state = _state(times, limits, first.max_concurrency or 0, num_windows, window_ns, slo_ms, on_step)
    _run(state, limits, _chunks(first, parts), on_step)
    return Simulation.of(times, state, window_ns if num_windows > 1 else None)


def _state(
    times: StepTimes,
    limits: SchedulerLimits,
    max_concurrency: int,
    num_windows: int,
    window_ns: int,
    slo_ms: Mapping[str, float] | None,
    on_step: object,
) -> kn.Kernel:
    max_batch, num_cells = limits.max_batch_size, times.grid.num_cells
    assert times.max_batch_size >= max_batch, "the times cover the largest batch"
    assert len(times.prefill_ns) > limits.prefill_chunk_tokens, "the times cover the largest chunk"
    rules = np.zeros(kn.NUM_RULES, dtype=np.int64)
    rules[kn.MAX_BATCH], rules[kn.PAGE_SIZE] = max_batch, limits.page_size
    rules[kn.CHUNK], rules[kn.MAX_CONCURRENCY] = limits.prefill_chunk_tokens, max_concurrency
    rules[kn.WINDOW_NS], rules[kn.RECORDING] = window_ns, on_step is not None
    rules[kn.TTFT_LIMIT : kn.E2EL_LIMIT + 1] = _limits_ns(slo_ms or {})
    scalars = np.zeros(kn.NUM_SCALARS, dtype=np.int64)
    scalars[kn.LAST_PHASE], scalars[kn.PREFILLING] = kn.DECODE, -1
    scalars[kn.FIRST_SENT_NS] = -1
    scalars[kn.NUM_FREE_SLOTS], scalars[kn.FREE_PAGES] = max_batch, limits.num_pages
    scalars[kn.NUM_PLACES] = max_concurrency
    return kn.Kernel(
        rules=rules,
        scalars=scalars,
        slots=_zeros(max_batch, kn.NUM_FIELDS),
        order=_zeros(max_batch),
        free_slots=np.arange(max_batch, dtype=np.int64),
        preempted=_zeros(max_batch),
        finishing=_zeros(max_batch),
        residues=_zeros(limits.page_size),
        places=_zeros(max(max_concurrency, 1)),
        sent=_zeros(max(max_concurrency, 1)),
        decode_ns=times.decode_ns,
        excess_ns=times.excess_ns,
        after_prefill_ns=times.after_prefill_ns,
        prefill_ns=times.prefill_ns,
        pairs=times.pairs,
        pairs_ns=times.pairs_ns,
        edges=times.grid.edges,
        histogram=_zeros(num_windows, max_batch + 1, num_cells),
        excess_tokens=_zeros(num_windows, max_batch + 1, num_cells),
        window_ns=_zeros(num_windows, max_batch + 1),
        batch_steps=_zeros(max_batch + 1),
        batch_ns=_zeros(max_batch + 1),
        latencies=_zeros(4, kn.NUM_LATENCY_BINS),
        records=_zeros(_MAX_RECORDS if on_step else 1, kn.RECORD_COLUMNS),
    )


def _zeros(*shape: int) -> NDArray[np.int64]:
    return np.zeros(shape, dtype=np.int64)


def _limits_ns(slo_ms: Mapping[str, float]) -> list[int]:
    names = ("ttft", "tpot", "e2el")
    if unknown := set(slo_ms) - set(names):
        raise ValueError(f"an SLO on {min(unknown)!r} is unknown: choose of {', '.join(names)}")
    return [round(slo_ms[name] * 1e6) if name in slo_ms else _NEVER for name in names]


def _chunks(first: Workload, rest: Iterator[Workload]) -> Iterator[tuple[Workload, bool]]:
    """Yield pieces of bounded length, and whether each is the last."""
    pieces = (
        Workload(part.arrival_s[here], part.prompt_len[here], part.output_len[here])
        for part in chain([first], rest)
        for start in range(0, len(part), _CHUNK_REQUESTS)
        for here in [slice(start, start + _CHUNK_REQUESTS)]
    )
    held = next(pieces)
    for piece in pieces:
        yield held, False
        held = piece
    yield held, True


def _run(
    state: kn.Kernel,
    limits: SchedulerLimits,
    chunks: Iterator[tuple[Workload, bool]],
    on_step: Callable[[SimulatedStep], object] | None,
) -> None:
    s = state.scalars
    requests = [np.zeros(0, dtype=np.int64) for _ in range(3)]
    reason = kn.NEED_REQUESTS
    while reason != kn.DONE:
        if reason == kn.NEED_REQUESTS:
            chunk, is_last = next(chunks)
            _check_longest(limits, chunk)
            requests = _refill(state, requests, chunk)
            s[kn.ALL_GIVEN] = is_last
        reason = advance(state, *requests)
        if on_step is not None:
            for step in _steps(state.records[: s[kn.NUM_RECORDS]]):
                on_step(step)
        s[kn.NUM_RECORDS] = 0


def _refill(state: kn.Kernel, requests: list[NDArray[np.int64]], chunk: Workload) -> list[NDArray[np.int64]]:
    """Drop the requests that were admitted, and append the chunk's."""
    s = state.scalars
    num_done = int(s[kn.NEXT_REQUEST])
    arrival_ns = np.rint(chunk.arrival_s * 1e9).astype(np.int64)
    new = [arrival_ns, chunk.prompt_len.astype(np.int64), chunk.output_len.astype(np.int64)]
    requests = [np.concatenate([old[num_done:], added]) for old, added in zip(requests, new, strict=True)]
    s[kn.NEXT_REQUEST] = 0
    s[kn.NEXT_TO_SEND] = max(0, s[kn.NEXT_TO_SEND] - num_done)
    s[kn.NUM_REQUESTS] = len(requests[0])
    return requests


def _check_longest(limits: SchedulerLimits, chunk: Workload) -> None:
    num_tokens = chunk.prompt_len.astype(np.int64) + chunk.output_len
    longest = chunk.request(int(num_tokens.argmax()))
    check_request(limits, longest)
    shortest = int(min(chunk.prompt_len.min(), chunk.output_len.min()))
    if shortest < 1:
        check_request(limits, Request(0, 0.0, shortest, shortest))


def _steps(records: NDArray[np.int64]) -> Iterator[SimulatedStep]:
    for phase, batch_size, num_tokens, num_kv_tokens, num_steps, start_ns, step_ns in records.tolist():
        for i in range(num_steps):
            yield SimulatedStep(
                "prefill" if phase == kn.PREFILL else "decode",
                batch_size,
                num_tokens,
                num_kv_tokens + i * batch_size,
                start_ns + (i + 1) * step_ns,
            )
