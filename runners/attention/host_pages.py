"""Page counts of a batch on the host: what a FlashInfer plan is made from."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from runners.errors import PlanLayoutError

IntArray = npt.NDArray[np.int32]
#: A host image of the inputs for each of a few turns, in each captured size.
_MAX_KNOWN_LENS = 1024


class HostLens:
    """Arrays of host lengths that come again and again: making one costs more than counting."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, IntArray]] = {}

    def array(self, seq_lens_cpu: torch.Tensor) -> IntArray:
        """Return the array of a tensor that later steps will bring again."""
        key = id(seq_lens_cpu)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = (seq_lens_cpu, seq_lens_cpu.numpy())
            if len(self._known) > _MAX_KNOWN_LENS:
                self._known.pop(next(iter(self._known)))
        return known[1]


class HostPages:
    """Page counts of the batch being planned, and what follows from them, in reused host memory.

    `count` comes first; if the plan at hand is not of these counts, `lay_out` prepares a new one.
    Plain memory is enough: FlashInfer's planner reads it during the call.

    Args:
        max_batch_size: requests.
        page_size: tokens a page.
        max_pages: pages of one request, at most.

    Attributes:
        batch_size: requests of the last `count`.
        counts: `[batch_size]` int32 array, pages of each request.
    """

    def __init__(self, max_batch_size: int, page_size: int, max_pages: int) -> None:
        self.max_batch_size = max_batch_size
        self.page_size = page_size
        self.max_pages = max_pages
        self.batch_size = 0
        self._indptr = torch.zeros(max_batch_size + 1, dtype=torch.int32)
        self._last_page_len = torch.ones(max_batch_size, dtype=torch.int32)
        self._seq_lens = torch.ones(max_batch_size, dtype=torch.int32)
        self._indptr_array: IntArray = self._indptr.numpy()
        self._last_array: IntArray = self._last_page_len.numpy()
        self._lens_array: IntArray = self._seq_lens.numpy()
        self._count_array: IntArray = np.zeros(max_batch_size, dtype=np.int32)
        self.counts = self._count_array[:0]
        self._lens = self._count_array[:0]
        # Arrays, since numpy takes longer to turn a Python number into one than to add it.
        self._rounding = np.array(page_size - 1, dtype=np.int32)
        shifts = page_size.bit_count() == 1
        self._divide = np.right_shift if shifts else np.floor_divide
        self._divisor = np.array(page_size.bit_length() - 1 if shifts else page_size, dtype=np.int32)
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    @property
    def indptr(self) -> torch.Tensor:
        """`[batch_size + 1]` int32: offsets of each request's pages in the packed list."""
        return self._batch_views()[0]

    @property
    def last_page_len(self) -> torch.Tensor:
        """`[batch_size]` int32: tokens in each request's last page, 1 to `page_size`."""
        n, counts = self.batch_size, self.counts
        np.subtract(self._lens_array[:n], (counts - 1) * self.page_size, out=self._last_array[:n])
        return self._batch_views()[1]

    @property
    def seq_lens(self) -> torch.Tensor:
        """`[batch_size]` int32: tokens of each request."""
        return self._batch_views()[2]

    def count(self, seq_lens_cpu: torch.Tensor) -> None:
        """Count the pages of requests with these lengths, `[batch_size]` int32, each at least 1."""
        self.count_array(seq_lens_cpu.numpy())

    def count_array(self, lens: IntArray) -> None:
        """As `count`, of an array."""
        self._lens = lens
        n = self.batch_size = len(lens)
        self.counts = counts = self._count_array[:n]
        np.add(lens, self._rounding, counts)
        self._divide(counts, self._divisor, counts)

    def lay_out(self) -> None:
        """Work out `indptr` and the others for the requests just counted, in place.

        Raises PlanLayoutError for a request longer than the page table is wide.
        """
        self.check()
        n, counts = self.batch_size, self.counts
        np.add.accumulate(counts, 0, None, self._indptr_array[1 : n + 1])
        self._lens_array[:n] = self._lens

    def check(self) -> None:
        """Raise PlanLayoutError for a request longer than the page table is wide."""
        n, counts = self.batch_size, self.counts
        if n and np.maximum.reduce(counts) > self.max_pages:
            raise PlanLayoutError(
                f"a request has {self._lens.max()} tokens, but the page table holds at most "
                f"{self.max_pages * self.page_size}: raise model.max_seq_len."
            )

    def _batch_views(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        n = self.batch_size
        if n not in self._views:
            self._views[n] = (self._indptr[: n + 1], self._last_page_len[:n], self._seq_lens[:n])
        return self._views[n]
