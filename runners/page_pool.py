"""Which pages of the KV cache are free."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from runners.errors import RunnerError

#: The reserved page. It stays zero or finite, and belongs to no request.
NULL_PAGE = 0


class PagePool:
    """Hands out page numbers `1 .. num_pages - 1`, each to one holder at a time."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages}: at least 2 are needed, one of them the null page.")
        if page_size < 1:
            raise ValueError(f"page_size={page_size}: must be at least 1 token.")
        self.num_pages = num_pages
        self.page_size = page_size
        # A stack, so that a page just released is the next one used: it is the warmest in the cache.
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._is_held = np.zeros(num_pages, dtype=np.bool_)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return int(self._is_held.sum())

    def allocate(self, n: int) -> list[int] | None:
        """Take `n` pages, or None and no page at all if fewer than `n` are free."""
        if n > len(self._free):
            return None
        if n == 0:
            return []
        pages = self._free[-n:][::-1]
        del self._free[-n:]
        self._is_held[pages] = True
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back. Raises RunnerError for a page that is not held (or given back twice)."""
        held = self._is_held[list(pages)]
        if len(set(pages)) != len(pages) or not held.all():
            raise RunnerError(f"pages {list(pages)} are released, but not all of them are held once.")
        self._is_held[list(pages)] = False
        self._free.extend(reversed(pages))

    def free_pages(self) -> npt.NDArray[np.int64]:
        return np.array(self._free, dtype=np.int64)

    def conserved(self) -> bool:
        """True if every page but the null page is either free or held, exactly once."""
        free = set(self._free)
        held = set(np.flatnonzero(self._is_held).tolist())
        complete = free | held == set(range(1, self.num_pages))
        return complete and not free & held and len(free) == len(self._free)
