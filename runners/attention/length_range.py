"""The lengths between which a plan holds, so that a step which keeps it need count nothing."""

from __future__ import annotations

import numpy as np

from runners.attention.decode_schedule import IntArray


class LengthRange:
    """For each request of a batch the fewest and the most tokens with which a plan still says the truth.

    Args:
        least_pages, most_pages: `[batch_size]` int32 each, at least 1: pages of each request.
        page_size: tokens a page.
        max_pages: pages of one request that the page table has room for.
    """

    def __init__(self, least_pages: IntArray, most_pages: IntArray, page_size: int, max_pages: int) -> None:
        self._least = (least_pages - 1) * page_size + 1
        most = np.minimum(most_pages, max_pages) * page_size
        self._span = most - self._least
        self._span_unsigned = self._span.view(np.uint32)
        self._above_least = np.empty_like(self._least)
        self._above_least_unsigned = self._above_least.view(np.uint32)
        self._flags = np.empty(len(most), dtype=np.bool_)

    def holds(self, lens: IntArray) -> bool:
        """Return True if each of these lengths, as many as pages were given, is within the range."""
        # With cold caches `out=` takes twice as long as its place, and `all` five times as long as a look at the bytes.
        np.subtract(lens, self._least, self._above_least)
        # As an unsigned number what is below the least is above any span.
        np.less_equal(self._above_least_unsigned, self._span_unsigned, self._flags)
        return 0 not in self._flags.tobytes()

    def is_exceeded(self) -> bool:
        """Return True if one of the lengths that `holds` was last asked about is above its most."""
        np.greater(self._above_least, self._span, self._flags)
        return 1 in self._flags.tobytes()
