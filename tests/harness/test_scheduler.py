from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.clock import CostClock, FixedClock
from harness.record import REQUESTS_SCHEMA, STEPS_SCHEMA
from harness.scheduler import ScheduledStep, SchedulerLimits, SchedulerPolicy
from harness.scheduler_loop import RequestRow, StepRow, run_loop
from harness.workload.base import Request, Workload
from tests.harness.paged_model import PagedModel, expected_tokens

LIMITS = SchedulerLimits(max_batch_size=4, num_pages=64, page_size=4, prefill_chunk_tokens=16, max_seq_len=64)


def workload(*requests: tuple[float, int, int], max_concurrency: int | None = None) -> Workload:
    arrival_s, prompt_len, output_len = zip(*requests, strict=True)
    return Workload(
        np.array(arrival_s, dtype=np.float64),
        np.array(prompt_len, dtype=np.int32),
        np.array(output_len, dtype=np.int32),
        max_concurrency,
    )


class Replay:
    """A replay on the paged model, with everything that it left."""

    def __init__(
        self,
        traffic: Workload,
        limits: SchedulerLimits = LIMITS,
        max_in_flight: int = 1,
        clock: CostClock | None = None,
    ) -> None:
        self.model = PagedModel(limits)
        self.policy = SchedulerPolicy(limits)
        self.steps: list[StepRow] = []
        self.requests: list[RequestRow] = []
        self.summary = run_loop(
            self.policy,
            self.model,
            clock or FixedClock(10.0),
            traffic,
            self.steps.append,
            self.requests.append,
            max_in_flight,
        )


@st.composite
def traffic_and_limits(draw: st.DrawFn) -> tuple[Workload, SchedulerLimits]:
    """Pools from ample to so small that most requests are preempted."""
    limits = SchedulerLimits(
        max_batch_size=draw(st.integers(1, 6)),
        num_pages=draw(st.integers(2, 12)),
        page_size=draw(st.integers(1, 5)),
        prefill_chunk_tokens=draw(st.integers(1, 24)),
        max_seq_len=draw(st.integers(2, 40)),
    )
    longest = limits.max_request_tokens
    requests = []
    for _ in range(draw(st.integers(1, 12))):
        prompt_len = draw(st.integers(1, max(1, longest // 3)))
        output_len = draw(st.integers(1, longest - prompt_len))
        requests.append((draw(st.integers(0, 5)) / 1e2, prompt_len, output_len))
    max_concurrency = draw(st.none() | st.integers(1, 8))
    return workload(*sorted(requests), max_concurrency=max_concurrency), limits


@settings(max_examples=150, deadline=None)
@given(traffic_and_limits(), st.integers(1, 3))
def test_each_request_is_answered_once_and_as_if_it_were_alone(
    case: tuple[Workload, SchedulerLimits], max_in_flight: int
) -> None:
    traffic, limits = case
    replay = Replay(traffic, limits, max_in_flight)
    requests = [traffic.request(index) for index in range(len(traffic))]
    assert replay.model.answers == {r.request_id: expected_tokens(r) for r in requests}
    assert sorted(row["request_id"] for row in replay.requests) == [r.request_id for r in requests]
    assert replay.model.max_in_flight <= max_in_flight


@settings(max_examples=100, deadline=None)
@given(traffic_and_limits())
def test_pages_are_conserved_at_every_step(case: tuple[Workload, SchedulerLimits]) -> None:
    traffic, limits = case
    policy = SchedulerPolicy(limits)
    for index in range(len(traffic)):
        policy.add(traffic.request(index))
    while step := policy.schedule():
        assert policy.pages_are_conserved()
        policy.complete(step)
        assert policy.pages_are_conserved()
    assert policy.num_free_pages == limits.num_pages
    assert not policy.has_work


@settings(max_examples=50, deadline=None)
@given(traffic_and_limits(), st.integers(1, 2))
def test_the_same_traffic_gives_the_same_rows(
    case: tuple[Workload, SchedulerLimits], max_in_flight: int
) -> None:
    first, second = (Replay(*case, max_in_flight) for _ in range(2))
    assert first.steps == second.steps
    assert first.requests == second.requests


@settings(max_examples=50, deadline=None)
@given(traffic_and_limits())
def test_outcomes_add_up(case: tuple[Workload, SchedulerLimits]) -> None:
    traffic, _ = case
    replay = Replay(*case)
    decoded = sum(row["batch_size"] for row in replay.steps if row["phase"] == "decode")
    prefills = len(traffic) + sum(row["num_preemptions"] for row in replay.requests)
    # A prefill yields one token, a decode step one a request; a prefill that is preempted halfway yields none.
    assert decoded + len(traffic) <= traffic.output_len.sum() <= decoded + prefills
    assert sum(row["num_preemptions"] for row in replay.requests) == replay.policy.num_preemptions


def test_a_long_prompt_is_prefilled_in_chunks_and_yields_its_token_with_the_last() -> None:
    replay = Replay(workload((0, 40, 2)))
    prefill = [step for step in replay.model.steps if step.phase == "prefill"]
    assert [(step.starts, step.ends) for step in prefill] == [([0], [16]), ([16], [32]), ([32], [40])]
    assert [step.yields_token for step in prefill] == [[False], [False], [True]]
    assert [len(step.admitted) for step in prefill] == [1, 0, 0]


def test_short_prompts_share_a_chunk() -> None:
    step = Replay(workload((0, 5, 2), (0, 6, 2), (0, 7, 2))).model.steps[0]
    assert step.request_ids == [0, 1, 2]
    assert (step.starts, step.ends) == ([0, 0, 0], [5, 6, 5])
    assert step.yields_token == [True, True, False]
    assert (step.num_tokens, step.num_kv_tokens) == (16, 16)


def test_decoding_never_waits_for_more_than_one_chunk() -> None:
    replay = Replay(workload((0, 4, 30), (0, 60, 2), (0, 60, 2)))
    phases = [row["phase"] for row in replay.steps]
    first, last = phases.index("decode"), 20
    assert all(phases[i] == "decode" or phases[i + 1] == "decode" for i in range(first, last))


def test_a_request_waits_while_the_batch_is_full() -> None:
    replay = Replay(workload(*[(0, 4, 10)] * 6))
    assert replay.model.max_rows == LIMITS.max_batch_size
    assert max(row["batch_size"] for row in replay.steps) == LIMITS.max_batch_size


def test_a_request_of_one_output_token_is_answered_by_its_prefill() -> None:
    replay = Replay(workload((0, 8, 1)))
    assert [row["phase"] for row in replay.steps] == ["prefill"]
    assert replay.requests[0]["tpot_ms"] is None


def test_the_youngest_gives_way_and_is_recomputed_with_what_it_had_generated() -> None:
    limits = SchedulerLimits(
        max_batch_size=2, num_pages=6, page_size=4, prefill_chunk_tokens=16, max_seq_len=24
    )
    replay = Replay(workload((0, 6, 12), (0, 6, 12)), limits)
    preempting = [step for step in replay.model.steps if step.preempted]
    assert [step.preempted for step in preempting] == [(1,)]
    again = next(step for step in replay.model.steps[preempting[0].index :] if step.admitted)
    num_generated = sum(
        yields
        for step in replay.model.steps[: preempting[0].index]
        for request_id, yields in zip(step.request_ids, step.yields_token, strict=True)
        if request_id == 1
    )
    assert again.request_ids == [1]
    assert (again.starts, again.ends) == ([0], [6 + num_generated])
    assert [row["num_preemptions"] for row in replay.requests] == [0, 1]


def test_a_full_pool_does_not_admit_what_it_would_preempt_at_once() -> None:
    limits = SchedulerLimits(
        max_batch_size=8, num_pages=8, page_size=4, prefill_chunk_tokens=64, max_seq_len=32
    )
    replay = Replay(workload(*[(0, 8, 8)] * 8), limits)
    assert replay.policy.num_preemptions <= 2


def test_a_request_that_can_never_run_is_refused_before_anything_runs() -> None:
    model = PagedModel(LIMITS)
    traffic = workload((0, 4, 4), (0, 60, 5))
    with pytest.raises(ValueError, match="request 1 has 65 tokens.*over_length"):
        run_loop(SchedulerPolicy(LIMITS), model, FixedClock(1.0), traffic, print, print)
    assert not model.steps


def test_a_pool_smaller_than_the_longest_request_is_named() -> None:
    limits = SchedulerLimits(
        max_batch_size=2, num_pages=3, page_size=4, prefill_chunk_tokens=16, max_seq_len=64
    )
    with pytest.raises(ValueError, match="allow 12: .*attention.num_pages"):
        SchedulerPolicy(limits).add(Request(0, 0.0, 8, 8))


@pytest.mark.parametrize("field", SchedulerLimits.__slots__)
def test_limits_below_one_are_refused_by_name(field: str) -> None:
    values = dict.fromkeys(SchedulerLimits.__slots__, 8) | {field: 0}
    with pytest.raises(ValueError, match=field):
        SchedulerLimits(**values)


def test_steps_must_be_completed_in_order() -> None:
    policy = SchedulerPolicy(LIMITS)
    policy.add(Request(0, 0.0, 20, 2))
    policy.schedule()
    second = policy.schedule()
    assert second is not None
    with pytest.raises(AssertionError, match="order"):
        policy.complete(second)


def test_with_two_steps_in_flight_a_finished_request_takes_no_further_step() -> None:
    policy = SchedulerPolicy(LIMITS)
    policy.add(Request(0, 0.0, 4, 2))
    policy.add(Request(1, 0.0, 4, 5))
    prefill, decode, ahead = policy.schedule(), policy.schedule(), policy.schedule()
    assert prefill and decode and ahead
    assert decode.request_ids == [0, 1]
    assert ahead.request_ids == [1]
    assert [policy.complete(step) for step in (prefill, decode, ahead)] == [[], [0], []]


def test_steps_share_their_request_ids_only_while_the_same_requests_decode() -> None:
    policy = SchedulerPolicy(LIMITS)
    policy.add(Request(0, 0.0, 4, 4))
    policy.add(Request(1, 0.0, 4, 6))
    steps = list(iter(policy.schedule, None))
    first, second, third, alone, last = (step for step in steps if step.phase == "decode")
    assert first.request_ids is second.request_ids is third.request_ids
    assert third.request_ids == [0, 1]
    assert third.request_ids is not alone.request_ids is last.request_ids
    assert (first.ends, third.starts, alone.starts) == ([5, 5], [6, 6], [7])


def test_arrivals_count_from_sending_even_in_the_middle_of_a_step() -> None:
    replay = Replay(workload((0.0, 4, 3), (0.004, 4, 1)))
    # Steps of 10 ms: prefill of 0 ends at 10, decode at 20 or prefill of 1 at 20 or 30.
    late = next(row for row in replay.requests if row["request_id"] == 1)
    assert late["sent_s"] == late["arrival_s"] == 0.004
    assert late["ttft_ms"] in (pytest.approx(16.0), pytest.approx(26.0))


def test_max_concurrency_delays_the_sending_and_latencies_count_from_it() -> None:
    replay = Replay(workload((0, 4, 3), (0, 4, 3), max_concurrency=1))
    assert [row["sent_s"] for row in replay.requests] == [0.0, 0.03]
    assert [row["arrival_s"] for row in replay.requests] == [0.0, 0.0]
    assert [row["ttft_ms"] for row in replay.requests] == [10.0, 10.0]
    assert max(row["batch_size"] for row in replay.steps) == 1


def test_the_clock_jumps_over_an_idle_hour() -> None:
    replay = Replay(workload((0, 4, 2), (3600, 4, 2)))
    assert len(replay.steps) == 4
    assert [row["clock_ms"] for row in replay.steps] == [10.0, 20.0, 3_600_010.0, 3_600_020.0]


def test_a_slower_step_enlarges_the_batch() -> None:
    """Above a ceiling the step is slower; slower steps keep the batch above it (sglang#33483)."""
    traffic = workload(*[(0.01 * i, 4, 20) for i in range(200)])
    limits = SchedulerLimits(
        max_batch_size=64, num_pages=1024, page_size=4, prefill_chunk_tokens=16, max_seq_len=64
    )

    def mean_batch(slow_ms: float) -> float:
        def cost_ms(step: ScheduledStep, result: object) -> float:
            return slow_ms if step.batch_size > 8 else 4.0

        steps = Replay(traffic, limits, clock=CostClock(cost_ms)).steps
        return float(np.mean([row["batch_size"] for row in steps if row["phase"] == "decode"]))

    assert mean_batch(12.0) > 1.5 * mean_batch(4.0)


def test_rows_have_the_columns_of_the_record() -> None:
    replay = Replay(workload((0, 4, 2)))
    # The loop knows no backend: the replay that records its rows adds that column.
    assert {*replay.steps[0], "graph_backend"} == set(STEPS_SCHEMA)
    assert list(replay.requests[0]) == list(REQUESTS_SCHEMA)


def test_with_steps_in_flight_rows_are_handed_over_only_when_nothing_runs() -> None:
    model = PagedModel(LIMITS)
    running: list[int] = []

    def on_step(row: StepRow) -> None:
        running.append(model.num_in_flight)

    traffic = workload(*[(0, 4, 40)] * 60)
    run_loop(SchedulerPolicy(LIMITS), model, FixedClock(1.0), traffic, on_step, lambda row: None, 2)
    assert len(running) == len(model.steps) > 512
    assert set(running) == {0}
