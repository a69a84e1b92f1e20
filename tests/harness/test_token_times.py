from __future__ import annotations

import numpy as np

from harness.scheduler import Phase, ScheduledStep
from harness.token_times import TokenTimes


def step(phase: Phase, *request_ids: int, without_token: int | None = None) -> ScheduledStep:
    ids = list(request_ids)
    yields_token = [request_id != without_token for request_id in ids]
    return ScheduledStep(0, phase, ids, ids, ids, yields_token, (), (), 0, 0)


def test_gaps_count_from_the_token_before_and_a_first_token_has_none() -> None:
    times = TokenTimes(4)
    num_tokens, gaps_ms = times.add(step("prefill", 0, 2, 3, without_token=3), 10.0)
    assert (num_tokens, gaps_ms.tolist()) == (2, [])
    decoding = step("decode", 0, 2)
    assert [times.add(decoding, now_ms)[1].tolist() for now_ms in (12.0, 15.0)] == [[2.0, 2.0], [3.0, 3.0]]
    # Request 2 was preempted: the token that its second prefill yields comes after a long gap.
    assert times.add(step("decode", 0), 16.0)[1].tolist() == [1.0]
    num_tokens, gaps_ms = times.add(step("prefill", 2, 3), 20.0)
    assert (num_tokens, gaps_ms.tolist()) == (2, [5.0])
    assert np.array_equal(times.first_ms, [10.0, np.nan, 10.0, 20.0], equal_nan=True)
