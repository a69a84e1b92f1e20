from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.clock import CostClock
from harness.planner import simulate as simulate_module
from harness.planner.contexts import ContextGrid
from harness.planner.simulate import SimulatedStep, simulate
from harness.planner.simulation import Simulation
from harness.planner.step_times import StepTimes
from harness.scheduler import ScheduledStep, SchedulerLimits, SchedulerPolicy
from harness.scheduler_loop import RequestRow, StepResult, StepRow, run_loop
from harness.workload.base import Workload
from runners.padding import StepPlan

#: Times are multiples of an eighth of a second, exact in binary: many steps end just as a request arrives.
EIGHTH_NS = 125_000_000


class NoModel:
    """Answers at once: the clock alone says what a step took."""

    RESULT = StepResult("graph", "", 1, 1, 1.0)

    def launch(self, step: ScheduledStep) -> NoModel:
        return self

    def resolve(self) -> StepResult:
        return self.RESULT

    def preempt(self, request_ids: Sequence[int]) -> None: ...

    def finish(self, request_ids: Sequence[int]) -> None: ...


def made_times(limits: SchedulerLimits, seed: int) -> StepTimes:
    """A random time for each batch size and context cell, and for each number of prefill tokens."""
    rng = np.random.default_rng(seed)
    grid = ContextGrid.up_to(limits.max_seq_len)
    decode = rng.integers(1, 9, (limits.max_batch_size + 1, grid.num_cells)) * EIGHTH_NS
    prefill = rng.integers(1, 9, limits.prefill_chunk_tokens + 1) * EIGHTH_NS
    plans = tuple(StepPlan("graph", (limits.max_batch_size,)) for _ in range(limits.max_batch_size + 1))
    by_batch = (limits.max_batch_size + 1,)
    pairs = np.array([0, 10, 100])
    return StepTimes(
        sizes=(limits.max_batch_size,),
        plans=plans,
        decode_ns=decode,
        excess_ns=rng.integers(0, 3, by_batch) * float(EIGHTH_NS),
        after_prefill_ns=rng.integers(0, 3, by_batch) * EIGHTH_NS,
        prefill_ns=prefill,
        pairs=pairs,
        pairs_ns=pairs * rng.integers(0, 2) * EIGHTH_NS,
        grid=grid,
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Workload, SchedulerLimits, StepTimes]:
    """Pools from ample to so small that most requests are preempted; chunks from one token up."""
    limits = SchedulerLimits(
        max_batch_size=draw(st.integers(1, 6)),
        num_pages=draw(st.integers(2, 12)),
        page_size=draw(st.integers(1, 5)),
        prefill_chunk_tokens=draw(st.integers(1, 24)),
        max_seq_len=draw(st.integers(2, 120)),
    )
    longest = limits.max_request_tokens
    prompts = draw(st.lists(st.integers(1, max(1, longest // 3)), min_size=1, max_size=20))
    outputs = [draw(st.integers(1, longest - prompt)) for prompt in prompts]
    arrivals = sorted(draw(st.integers(0, 60)) / 8 for _ in prompts)
    workload = Workload(
        np.array(arrivals),
        np.array(prompts, dtype=np.int32),
        np.array(outputs, dtype=np.int32),
        draw(st.none() | st.integers(1, 8)),
    )
    return workload, limits, made_times(limits, draw(st.integers(0, 1000)))


class Reference:
    """The same replay by the scheduler's own policy and loop."""

    def __init__(self, workload: Workload, limits: SchedulerLimits, times: StepTimes) -> None:
        def cost_ms(step: ScheduledStep, result: StepResult) -> float:
            follows_prefill, self.last_phase = self.last_phase == "prefill", step.phase
            if step.phase == "prefill":
                spans = zip(step.starts, step.ends, strict=True)
                return times.prefill_ms(step.num_tokens, sum(start * (end - start) for start, end in spans))
            return times.decode_ms(step.batch_size, step.num_kv_tokens, max(step.ends), follows_prefill)

        self.last_phase = "decode"
        self.policy = SchedulerPolicy(limits)
        self.rows: list[StepRow] = []
        self.requests: list[RequestRow] = []
        self.summary = run_loop(
            self.policy, NoModel(), CostClock(cost_ms), workload, self.rows.append, self.requests.append
        )

    def steps(self) -> list[SimulatedStep]:
        return [
            SimulatedStep(
                row["phase"],
                row["batch_size"],
                row["num_tokens"],
                row["num_kv_tokens"],
                round(row["clock_ms"] * 1e6),
            )
            for row in self.rows
        ]


def simulated(
    workload: Workload, limits: SchedulerLimits, times: StepTimes, num_windows: int = 1
) -> tuple[Simulation, list[SimulatedStep]]:
    steps: list[SimulatedStep] = []
    return simulate(times, limits, workload, num_windows=num_windows, on_step=steps.append), steps


@settings(max_examples=200, deadline=None)
@given(cases())
def test_every_step_is_the_one_that_the_scheduler_takes(
    case: tuple[Workload, SchedulerLimits, StepTimes],
) -> None:
    reference = Reference(*case)
    simulation, steps = simulated(*case)
    assert steps == reference.steps()
    assert simulation.num_preemptions == reference.policy.num_preemptions
    assert simulation.num_answered == len(reference.requests)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_mean_latencies_are_those_of_the_replay(case: tuple[Workload, SchedulerLimits, StepTimes]) -> None:
    summary = Reference(*case).summary.bench_serve()
    simulation, _ = simulated(*case)
    for name, precision in {"ttft": 1e-6, "tpot": 1e-6, "e2el": 1e-6, "itl": 0.02}.items():
        simulated_ms, expected_ms = simulation.latency_ms[name]["mean"], summary[f"mean_{name}_ms"]
        assert simulated_ms == (expected_ms and pytest.approx(expected_ms, rel=precision))
    assert simulation.duration_ms == pytest.approx(summary["duration"] * 1e3)


@settings(max_examples=30, deadline=None)
@given(cases(), st.integers(1, 7))
def test_a_trace_in_parts_gives_the_steps_of_the_whole(
    case: tuple[Workload, SchedulerLimits, StepTimes], part: int
) -> None:
    workload, limits, times = case
    whole = simulated(*case)[1]
    pieces = [
        Workload(
            workload.arrival_s[start : start + part],
            workload.prompt_len[start : start + part],
            workload.output_len[start : start + part],
            workload.max_concurrency,
        )
        for start in range(0, len(workload), part)
    ]
    steps: list[SimulatedStep] = []
    simulate(times, limits, pieces, on_step=steps.append)
    assert steps == whole


def test_more_steps_than_records_are_all_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = SchedulerLimits(2, 40, 4, 8, 64)
    workload = Workload(np.zeros(4), np.full(4, 10, dtype=np.int32), np.full(4, 30, dtype=np.int32))
    case = workload, limits, made_times(limits, 0)
    monkeypatch.setattr(simulate_module, "_MAX_RECORDS", 3)
    assert simulated(*case)[1] == Reference(*case).steps()


def steady_case(num_requests: int = 200) -> tuple[Workload, SchedulerLimits, StepTimes]:
    limits = SchedulerLimits(4, 400, 4, 16, 64)
    arrivals = np.arange(num_requests) * 4.0
    lengths = np.full(num_requests, 12, dtype=np.int32)
    return Workload(arrivals, lengths, lengths), limits, made_times(limits, 3)


def test_the_ramp_and_the_drain_are_left_out_of_the_histogram() -> None:
    workload, limits, times = steady_case()
    simulation, steps = simulated(workload, limits, times, num_windows=4)
    decodes = [step for step in steps if step.phase == "decode"]
    first_answer = workload.output_len[0]  # the first request decodes all but its first token
    assert 0 < simulation.histogram.sum() <= len(decodes) - (first_answer - 1)
    last_arrival_ns = workload.arrival_s[-1] * 1e9
    assert simulation.histogram.sum() < sum(step.clock_ns <= last_arrival_ns for step in decodes)


@settings(max_examples=30, deadline=None)
@given(cases(), st.sets(st.integers(1, 5)))
def test_the_padding_waste_of_a_list_is_that_counted_row_by_row(
    case: tuple[Workload, SchedulerLimits, StepTimes], smaller: set[int]
) -> None:
    workload, limits, times = case
    largest = limits.max_batch_size
    sizes = sorted({size for size in smaller if size < largest} | {largest})
    padded = [next(size for size in sizes if size >= batch_size) for batch_size in range(largest + 1)]
    plans = tuple(StepPlan("graph", (size,)) for size in padded)
    simulation, steps = simulated(workload, limits, replace(times, plans=plans))
    decoded = [step.batch_size for step in steps if step.phase == "decode"]
    is_used = [row < batch_size for batch_size in decoded for row in range(padded[batch_size])]
    waste = simulation.padding_waste()
    assert waste == (pytest.approx(is_used.count(False) / len(is_used)) if is_used else None)


def test_windows_split_the_time_of_the_arrivals() -> None:
    simulation, _ = simulated(*steady_case(), num_windows=4)
    per_window = simulation.histogram.sum(axis=(1, 2))
    assert simulation.window_ms == pytest.approx(199 * 4.0 * 1e3 / 4)
    assert (per_window > 0).all()


def test_all_steps_are_counted_by_batch_size_with_their_time() -> None:
    simulation, steps = simulated(*steady_case())
    decodes = [step for step in steps if step.phase == "decode"]
    assert simulation.num_decode_steps == len(decodes)
    assert (
        simulation.batch_steps.tolist() == np.bincount([s.batch_size for s in decodes], minlength=5).tolist()
    )
    clock_ns = [0, *(step.clock_ns for step in steps)]
    spent = sum(
        after - before
        for before, after, step in zip(clock_ns, clock_ns[1:], steps, strict=False)
        if step.phase == "decode"
    )
    assert simulation.batch_ns.sum() == spent


def test_a_slower_step_enlarges_the_batch() -> None:
    workload, limits, times = steady_case()
    slow = replace(times, decode_ns=times.decode_ns * 4)
    fast_batch = simulated(workload, limits, times)[0].mean_batch_size
    slow_batch = simulated(workload, limits, slow)[0].mean_batch_size
    assert fast_batch is not None and slow_batch is not None
    assert slow_batch > fast_batch


def test_an_answer_is_good_within_every_limit() -> None:
    workload, limits, times = steady_case(20)
    rows = Reference(workload, limits, times).requests
    limit_ms = sorted(row["ttft_ms"] for row in rows)[10]
    simulation = simulate(times, limits, workload, slo_ms={"ttft": limit_ms})
    assert simulation.num_good == sum(row["ttft_ms"] <= limit_ms for row in rows)


def test_an_unknown_slo_is_refused() -> None:
    workload, limits, times = steady_case(5)
    with pytest.raises(ValueError, match="choose of ttft, tpot, e2el"):
        simulate(times, limits, workload, slo_ms={"itl": 1.0})


def test_a_request_that_could_never_run_is_refused() -> None:
    _, limits, times = steady_case(5)
    long = Workload(np.zeros(1), np.array([60], dtype=np.int32), np.array([60], dtype=np.int32))
    with pytest.raises(ValueError, match="over_length"):
        simulate(times, limits, long)
