"""The stopwatch on known work: a timer that only the stub executor and the hooks advance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from harness.clock import CostClock, FixedClock, MeasuredClock
from harness.scheduler import ScheduledStep, SchedulerLimits, SchedulerPolicy
from harness.scheduler_loop import StepResult, StepRow, run_loop
from harness.workload.base import Workload

LIMITS = SchedulerLimits(max_batch_size=4, num_pages=64, page_size=4, prefill_chunk_tokens=16, max_seq_len=64)


class Timer:
    def __init__(self) -> None:
        self.now_ns = 12345

    def __call__(self) -> int:
        return self.now_ns

    def work_ms(self, ms: float) -> None:
        self.now_ns += round(ms * 1e6)


class KnownWork:
    """2 ms to launch, 3 ms to wait; giving rows back costs 1 ms."""

    def __init__(self, timer: Timer) -> None:
        self._timer = timer

    def launch(self, step: ScheduledStep) -> KnownWork:
        self._timer.work_ms(2)
        return self

    def resolve(self) -> StepResult:
        self._timer.work_ms(3)
        return StepResult("eager", "", 1, 0, 3.0)

    def preempt(self, request_ids: Sequence[int]) -> None:
        self._timer.work_ms(1)

    def finish(self, request_ids: Sequence[int]) -> None:
        self._timer.work_ms(1)


def one_request(output_len: int, arrival_s: float = 0.0) -> Workload:
    return Workload(np.array([arrival_s]), np.array([4], np.int32), np.array([output_len], np.int32))


def replay(traffic: Workload, max_in_flight: int = 1) -> list[StepRow]:
    """Replay on a measured clock; recording a step costs 100 ms."""
    timer, rows = Timer(), []

    def record(row: StepRow) -> None:
        timer.work_ms(100)
        rows.append(row)

    run_loop(
        SchedulerPolicy(LIMITS),
        KnownWork(timer),
        MeasuredClock(),
        traffic,
        record,
        lambda row: timer.work_ms(100),
        max_in_flight,
        timer_ns=timer,
    )
    return rows


def test_a_measured_step_lasts_from_launch_to_launch_without_the_recording() -> None:
    rows = replay(one_request(3))
    assert [row["clock_ms"] for row in rows] == pytest.approx([5.0, 10.0, 16.0])


def test_idle_time_is_jumped_over_and_not_measured() -> None:
    rows = replay(one_request(2, arrival_s=60.0))
    assert [row["clock_ms"] for row in rows] == pytest.approx([60_005.0, 60_011.0])


def test_recording_is_left_out_with_steps_in_flight_too() -> None:
    # Launch 2, launch 2, wait 3 | launch 2, wait 3 | wait 3, finish 1.
    rows = replay(one_request(3), max_in_flight=2)
    assert [row["clock_ms"] for row in rows] == pytest.approx([7.0, 12.0, 16.0])


def step(batch_size: int) -> ScheduledStep:
    lists = [0] * batch_size
    return ScheduledStep(0, "decode", lists, lists, lists, [True] * batch_size, (), (), batch_size, 0)


RESULT = StepResult("graph", "", 8, 1, 123.0)


def test_a_fixed_clock_ignores_the_measured_time() -> None:
    clock = FixedClock(2.5)
    assert [clock.advance(step(1), RESULT, ms) for ms in (1.0, 99.0)] == [2.5, 5.0]


def test_a_cost_clock_asks_for_the_cost_of_the_step_as_it_ran() -> None:
    clock = CostClock(lambda step, result: 0.5 * step.batch_size + result.padded_batch_size)
    assert clock.advance(step(4), RESULT, 99.0) == 10.0


@pytest.mark.parametrize("clock", [MeasuredClock(), FixedClock(1.0)])
def test_a_jump_never_goes_back(clock: FixedClock | MeasuredClock) -> None:
    clock.jump_to(50.0)
    clock.jump_to(20.0)
    assert clock.now_ms == 50.0
