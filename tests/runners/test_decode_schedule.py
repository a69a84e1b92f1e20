"""A plan is kept exactly while FlashInfer's planner would write it again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.attention.decode_schedule import DecodeSchedule, PlanArrays, SplitRule

COUNTS = st.integers(1, 6).flatmap(lambda n: st.lists(st.integers(1, 200), min_size=n, max_size=n))


def plan(rule: SplitRule, counts: list[int]) -> PlanArrays:
    """FlashInfer's binary search over chunk sizes, step by step as in scheduler.cuh."""
    assert rule.max_chunks is not None
    pages = [min(count, rule.max_pages or count) for count in counts]
    low, high = rule.min_chunk_pages, max(pages)
    while low < high:
        middle = (low + high) // 2
        if sum(-(-p // middle) for p in pages) > rule.max_chunks:
            low = middle + 1
        else:
            high = middle
    offsets = np.cumsum([0, *(-(-p // low) for p in pages)], dtype=np.int32)
    return PlanArrays(True, low * rule.page_size, offsets)


def array(counts: list[int]) -> np.ndarray:
    return np.array(counts, dtype=np.int32)


def same(one: PlanArrays, other: PlanArrays) -> bool:
    return one.chunk_tokens == other.chunk_tokens and np.array_equal(one.offsets, other.offsets)


@given(
    page_size=st.sampled_from([1, 16, 32]),
    before=COUNTS,
    max_pages=st.none() | st.integers(1, 100),
    spare=st.integers(0, 12),
    data=st.data(),
)
def test_a_plan_is_kept_exactly_when_planning_again_would_write_the_same(
    page_size: int, before: list[int], max_pages: int | None, spare: int, data: st.DataObject
) -> None:
    rule = SplitRule(page_size, max_chunks=len(before) + spare, max_pages=max_pages)
    steps = data.draw(st.lists(st.integers(-20, 20), min_size=len(before), max_size=len(before)))
    after = [max(1, count + step) for count, step in zip(before, steps, strict=True)]
    planned, again = plan(rule, before), plan(rule, after)
    schedule = DecodeSchedule.make(rule, planned, array(before))
    assert schedule is not None
    assert schedule.serves(array(before))
    assert schedule.serves(array(after)) == same(planned, again)


@given(
    before=COUNTS,
    max_pages=st.none() | st.integers(1, 100),
    spare=st.integers(-1, 12),
    data=st.data(),
)
def test_a_plan_serves_every_batch_between_its_bounds_and_none_above(
    before: list[int], max_pages: int | None, spare: int, data: st.DataObject
) -> None:
    rule = SplitRule(16, max_chunks=len(before) + spare, max_pages=max_pages)
    schedule = DecodeSchedule.make(rule, plan(rule, before), array(before))
    assert schedule is not None
    least, most = schedule.bounds(array(before))
    assert least.dtype == most.dtype == np.int32 and (least <= array(before)).all() and (before <= most).all()
    top = np.minimum(most, 1000)
    between = [
        data.draw(st.integers(low, high)) for low, high in zip(least.tolist(), top.tolist(), strict=True)
    ]
    assert schedule.serves(array(between)) and schedule.serves(top) and schedule.serves(least)
    bounded = np.flatnonzero(most < 1000)
    if len(bounded):
        between[bounded[0]] = int(most[bounded[0]]) + 1
        assert not schedule.serves(array(between))


@given(COUNTS)
def test_with_more_requests_than_chunks_fit_each_request_stays_whole(before: list[int]) -> None:
    """The tensor-core planner of a graph then takes the longest request as the chunk."""
    rule = SplitRule(16, max_chunks=len(before) - 1)
    schedule = DecodeSchedule.make(rule, plan(rule, before), array(before))
    assert schedule is not None
    longer = array([max(before)] * len(before))
    assert schedule.serves(longer)
    longer[0] = max(*before, rule.min_chunk_pages) + 1
    assert not schedule.serves(longer)


def test_a_plan_that_never_splits_serves_every_length() -> None:
    rule = SplitRule(16, max_chunks=None)
    schedule = DecodeSchedule.make(
        rule, PlanArrays(False, 16, np.arange(4, dtype=np.int32)), array([1, 1, 1])
    )
    assert schedule is not None and schedule.serves(array([1, 500, 7]))
    least, most = schedule.bounds(array([1, 1, 1]))
    assert least.tolist() == [1, 1, 1] and (most > 10**6).all()


@pytest.mark.parametrize(
    "arrays",
    [
        PlanArrays(True, 128, array([0, 2, 3])),  # another number of chunks than the size says
        PlanArrays(True, 256, array([0, 1, 2])),  # a smaller size would have fitted
        PlanArrays(True, 100, array([0, 1, 2])),  # no whole number of pages
        PlanArrays(True, 64, array([0, 2, 4])),  # smaller than the smallest
        PlanArrays(False, 128, array([0, 2, 4])),  # split without saying so
    ],
)
def test_a_plan_that_the_rule_does_not_explain_is_not_kept(arrays: PlanArrays) -> None:
    rule = SplitRule(16, max_chunks=10)
    assert DecodeSchedule.make(rule, arrays, array([8, 8])) is None
    assert DecodeSchedule.make(rule, PlanArrays(True, 128, array([0, 1, 2])), array([8, 8])) is not None


def test_without_the_size_of_the_grid_a_split_plan_is_not_kept() -> None:
    planned = PlanArrays(True, 128, array([0, 1, 2]))
    assert DecodeSchedule.make(SplitRule(16, max_chunks=None), planned, array([8, 8])) is None
