"""The lengths between which a plan holds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from runners.attention.length_range import LengthRange

MAX_PAGES = 8


@given(page_size=st.sampled_from([1, 7, 16]), data=st.data())
def test_lengths_are_within_exactly_when_the_pages_they_need_are(page_size: int, data: st.DataObject) -> None:
    pages = st.integers(1, 12).flatmap(lambda least: st.tuples(st.just(least), st.integers(least, 12)))
    bounds = data.draw(st.lists(pages.filter(lambda pair: pair[0] <= MAX_PAGES), min_size=1, max_size=4))
    least, most = (np.array(side, dtype=np.int32) for side in zip(*bounds, strict=True))
    lengths = LengthRange(least, most, page_size, MAX_PAGES)
    for _ in range(3):
        lens = np.array([data.draw(st.integers(0, 10 * page_size)) for _ in bounds], dtype=np.int32)
        needed = -(-lens // page_size)
        within = (least <= needed) & (needed <= np.minimum(most, MAX_PAGES))
        assert lengths.holds(lens) == within.all()
        assert lengths.is_exceeded() == (needed > np.minimum(most, MAX_PAGES)).any()


def test_a_bound_that_is_no_bound_is_the_width_of_the_page_table() -> None:
    least, most = np.ones(2, dtype=np.int32), np.full(2, np.iinfo(np.int32).max, dtype=np.int32)
    lengths = LengthRange(least, most, 16, MAX_PAGES)
    assert lengths.holds(np.array([1, 128], dtype=np.int32))
    assert not lengths.holds(np.array([1, 129], dtype=np.int32))
