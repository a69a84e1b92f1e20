from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from runners.attention.base import AttentionGroup
from runners.errors import NullPageError, OutOfPagesError, RunnerError
from runners.paged_kv import NULL_PAGE, PADDING_ROW, PagedKV, PagePool

GROUP = AttentionGroup(num_qo_heads=2, num_kv_heads=1, head_dim=2, sm_scale=1.0)
PAGE_SIZE = 4


def make_kv(num_pages: int = 9, max_requests: int = 3, max_seq_len: int = 20, num_layers: int = 2) -> PagedKV:
    return PagedKV(
        [GROUP] * num_layers,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_requests=max_requests,
        max_seq_len=max_seq_len,
        dtype=torch.float32,
        device="cpu",
    )


# --- pages -------------------------------------------------------------------------------------


def test_the_null_page_is_never_handed_out() -> None:
    pages = PagePool(5, PAGE_SIZE).allocate(4)
    assert pages is not None and sorted(pages) == [1, 2, 3, 4]


def test_an_allocation_is_all_or_nothing() -> None:
    pool = PagePool(5, PAGE_SIZE)
    assert pool.allocate(5) is None
    assert pool.num_free == 4


def test_a_page_released_twice_is_refused() -> None:
    pool = PagePool(5, PAGE_SIZE)
    pages = pool.allocate(2)
    assert pages is not None
    pool.release(pages)
    with pytest.raises(RunnerError, match="held"):
        pool.release(pages)
    assert pool.conserved()


def test_a_request_that_cannot_grow_changes_nothing() -> None:
    kv = make_kv(num_pages=3)
    first, second = kv.add_request(), kv.add_request()
    assert kv.extend(first, 5)
    assert not kv.extend(second, 1)
    assert (kv.num_free_pages, kv.table.lengths[second]) == (0, 0)


def test_growing_within_a_page_takes_no_page() -> None:
    kv = make_kv()
    row = kv.add_request()
    assert kv.extend(row, 1)
    free = kv.num_free_pages
    assert kv.extend(row, PAGE_SIZE) and kv.num_free_pages == free
    assert kv.extend(row, PAGE_SIZE + 1) and kv.num_free_pages == free - 1


def test_a_request_longer_than_the_table_is_refused() -> None:
    kv = make_kv(max_seq_len=8)
    with pytest.raises(RunnerError, match="max_seq_len=8"):
        kv.extend(kv.add_request(), 9)


def test_a_full_request_table_says_what_to_raise() -> None:
    kv = make_kv(max_requests=1)
    kv.add_request()
    with pytest.raises(RunnerError, match=r"runner\.max_batch_size"):
        kv.add_request()


def test_a_pool_is_not_resized_under_its_requests() -> None:
    kv = make_kv()
    row = kv.add_request()
    kv.extend(row, 1)
    with pytest.raises(RunnerError, match="1 pages are held"):
        kv.resize(20)
    kv.release(row)
    kv.resize(20)
    assert (kv.generation, kv.num_free_pages, kv.k_cache[0].shape[0]) == (1, 19, 20)


# --- slots and the table -----------------------------------------------------------------------


def test_slots_follow_the_pages_in_order() -> None:
    kv = make_kv()
    row = kv.add_request()
    kv.extend(row, 10)
    pages = kv.page_table_cpu[row]
    expected = [int(pages[i // PAGE_SIZE]) * PAGE_SIZE + i % PAGE_SIZE for i in range(10)]
    assert kv.slots(row, 0, 10).tolist() == expected
    assert kv.decode_slots([row, PADDING_ROW], [9, 0]).tolist() == [expected[9], 0]


@pytest.mark.parametrize("position", [-1, 4, 20, 1000])
def test_a_token_without_a_page_has_no_slot(position: int) -> None:
    kv = make_kv()
    row = kv.add_request()
    kv.extend(row, 4)
    with pytest.raises(OutOfPagesError):
        kv.decode_slots([row], [position])


def test_a_position_beyond_the_longest_request_has_no_slot_even_in_a_page_that_is_held() -> None:
    kv = make_kv(max_seq_len=14)
    row = kv.add_request()
    assert kv.extend(row, 14)
    assert kv.decode_slots([row], [13]).shape == (1,)
    with pytest.raises(
        OutOfPagesError, match=r"positions outside 0\.\.13 have no slot: raise model.max_seq_len"
    ):
        kv.decode_slots([row], [14])


def test_old_columns_are_cleared_on_release() -> None:
    kv = make_kv()
    row = kv.add_request()
    kv.extend(row, 20)
    kv.flush()
    kv.release(row)
    kv.flush()
    assert (kv.page_table_cpu == NULL_PAGE).all()
    assert (kv.page_table == NULL_PAGE).all()


def test_the_device_table_follows_at_flush_and_not_before() -> None:
    kv = make_kv()
    row = kv.add_request()
    kv.extend(row, 9)
    assert (kv.page_table == NULL_PAGE).all()
    kv.flush()
    assert np.array_equal(kv.page_table.numpy(), kv.page_table_cpu)


# --- pages opened by a decode step -------------------------------------------------------------


def decoding(lengths: Sequence[int]) -> tuple[PagedKV, np.ndarray]:
    """A cache whose device knows all pages of requests of these lengths, and their rows."""
    kv = make_kv()
    rows = np.array([kv.add_request() for _ in lengths], dtype=np.int32)
    for row, length in zip(rows.tolist(), lengths, strict=True):
        assert kv.extend(row, length)
    kv.flush()
    return kv, rows


def lens(*lengths: int) -> np.ndarray:
    return np.array(lengths, dtype=np.int32)


def is_known(kv: PagedKV) -> bool:
    return np.array_equal(kv.page_table.numpy(), kv.page_table_cpu)


def test_opening_gives_the_pages_that_extending_would() -> None:
    (kv, rows), (other, _) = decoding([4, 5, 8]), decoding([4, 5, 8])
    assert kv.open_pages(rows, lens(5, 6, 9))
    for row, length in zip(rows.tolist(), (5, 6, 9), strict=True):
        assert other.extend(row, length)
    assert np.array_equal(kv.page_table_cpu, other.page_table_cpu)
    assert kv.table.num_pages[rows].tolist() == [2, 2, 3]
    assert kv.open_pages(rows, lens(5, 6, 9)) and np.array_equal(kv.page_table_cpu, other.page_table_cpu)


def test_opening_more_pages_than_are_free_changes_nothing() -> None:
    kv, rows = decoding([4, 4])
    kv.extend(kv.add_request(), (kv.num_free_pages - 1) * PAGE_SIZE)
    before = kv.page_table_cpu.copy()
    assert not kv.open_pages(rows, lens(5, 5))
    assert kv.num_free_pages == 1 and np.array_equal(kv.page_table_cpu, before)


def test_a_page_is_not_opened_behind_a_gap_or_the_end() -> None:
    kv, rows = decoding([4])
    with pytest.raises(RunnerError, match="lacks pages for earlier tokens"):
        kv.open_pages(rows, lens(9))
    assert kv.extend(int(rows[0]), 20)
    with pytest.raises(RunnerError, match="max_seq_len"):
        kv.open_pages(rows, lens(21))


@pytest.mark.parametrize("row", [PADDING_ROW, 2])
def test_no_page_is_opened_for_a_row_that_is_not_in_use(row: int) -> None:
    kv, rows = decoding([4])
    with pytest.raises(RunnerError, match=f"row {row} of the request table is not in use"):
        kv.open_pages(np.append(rows, np.int32(row)), lens(5, 1))
    assert kv.pool.num_held == 1


def test_an_opened_page_reaches_the_device_after_its_own_step() -> None:
    kv, rows = decoding([4, 5])
    kv.open_pages(rows, lens(5, 6))
    kv.flush_urgent()
    assert not is_known(kv)
    kv.settle()
    assert is_known(kv)


@pytest.mark.parametrize("between", ["another opening", "no launch", "an arrival"])
def test_an_opened_page_is_known_before_any_later_step(between: str) -> None:
    kv, rows = decoding([4, 5])
    kv.open_pages(rows, lens(5, 6))
    if between == "another opening":
        kv.open_pages(rows[1:], lens(9))
    elif between == "no launch":
        kv.flush_urgent()
    else:
        kv.extend(kv.add_request(), 1)
    kv.flush_urgent()
    assert is_known(kv)


# --- poison ------------------------------------------------------------------------------------


def test_poison_fills_free_pages_and_spares_held_ones_and_the_null_page() -> None:
    kv = make_kv()
    row = kv.add_request()
    kv.extend(row, 5)
    kv.poison_unallocated()
    clean = {NULL_PAGE, *kv.page_table_cpu[row, :2].tolist()}
    for cache in (*kv.k_cache, *kv.v_cache):
        finite = cache.isfinite().flatten(1).all(1)
        assert set(torch.nonzero(finite).flatten().tolist()) == clean


def test_poison_fills_the_tail_of_a_live_page_only_past_its_length() -> None:
    kv = make_kv()
    row = kv.add_request()
    kv.extend(row, 6)
    kv.poison_tails()
    flat = kv.k_cache[1].flatten(0, 1)
    assert flat[torch.from_numpy(kv.slots(row, 0, 6))].isfinite().all()
    assert flat[torch.from_numpy(kv.slots(row, 6, 8))].isnan().all()


def test_a_token_that_was_given_a_slot_is_no_tail() -> None:
    kv = make_kv()
    row = kv.add_request()
    kv.extend(row, 1)
    slot = torch.from_numpy(kv.decode_slots([row], [1]))  # the page is there: nothing to extend
    kv.poison_tails()
    assert kv.k_cache[0].flatten(0, 1)[slot].isfinite().all()


@pytest.mark.parametrize("is_opened", [False, True])
def test_a_poisoned_page_is_clean_for_its_next_holder(is_opened: bool) -> None:
    kv = make_kv(num_pages=3)
    row = kv.add_request()
    kv.extend(row, 5)
    kv.poison_tails()
    kv.release(row)
    kv.poison_unallocated()
    row = kv.add_request()
    assert kv.open_pages(np.array([row], dtype=np.int32), lens(1)) if is_opened else kv.extend(row, 8)
    kv.extend(row, 8)
    assert all(cache.isfinite().all() for cache in (*kv.k_cache, *kv.v_cache))


def test_a_spoilt_null_page_is_found_in_any_layer() -> None:
    kv = make_kv()
    kv.check_null_page()
    kv.v_cache[1][NULL_PAGE, 0] = float("inf")
    with pytest.raises(NullPageError, match="V cache of layer 1"):
        kv.check_null_page()
    kv.zero_null_page()
    kv.check_null_page()


# --- property ----------------------------------------------------------------------------------


class PagesAreConserved(RuleBasedStateMachine):
    """Requests come, grow and go in any order; no page is lost, shared or handed out twice."""

    rows = Bundle("rows")

    def __init__(self) -> None:
        super().__init__()
        self.kv = make_kv(num_pages=8, max_requests=4, max_seq_len=17, num_layers=1)
        self.lengths: dict[int, int] = {}

    @rule(target=rows)
    def add(self) -> int:
        if len(self.lengths) == 4:
            with pytest.raises(RunnerError):
                self.kv.add_request()
            return PADDING_ROW
        row = self.kv.add_request()
        self.lengths[row] = 0
        return row

    @rule(row=rows, length=st.integers(1, 17))
    def extend(self, row: int, length: int) -> None:
        if row not in self.lengths:
            return
        free = self.kv.num_free_pages
        missing = max(0, -(-length // PAGE_SIZE) - -(-self.lengths[row] // PAGE_SIZE))
        assert self.kv.extend(row, length) == (missing <= free)
        if missing <= free:
            self.lengths[row] = max(self.lengths[row], length)

    @rule(row=consumes(rows))
    def release(self, row: int) -> None:
        if self.lengths.pop(row, None) is not None:
            self.kv.release(row)

    @rule()
    def poison(self) -> None:
        self.kv.poison_unallocated()
        self.kv.poison_tails()

    @rule()
    def flush(self) -> None:
        self.kv.flush()
        assert np.array_equal(self.kv.page_table.numpy(), self.kv.page_table_cpu)

    @invariant()
    def no_page_is_lost_or_shared(self) -> None:
        slots = [self.kv.slots(row, 0, length) for row, length in self.lengths.items()]
        taken = np.concatenate([np.empty(0, dtype=np.int64), *slots])
        assert self.kv.pool.conserved()
        assert len(np.unique(taken)) == len(taken) and (taken >= PAGE_SIZE).all()
        assert self.kv.pool.num_held == sum(-(-n // PAGE_SIZE) for n in self.lengths.values())

    @invariant()
    def the_null_page_is_finite(self) -> None:
        self.kv.check_null_page()


TestPagesAreConserved = PagesAreConserved.TestCase
TestPagesAreConserved.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
