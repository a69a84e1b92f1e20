"""Which pages each request holds, on the host and on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from runners.errors import RunnerError
from runners.page_pool import NULL_PAGE
from runners.staging import StagingRing

#: The reserved row of the request table. All its columns are `NULL_PAGE`.
PADDING_ROW = 0


class RequestTable:
    """Row of a request → its pages, on the host and on the device."""

    def __init__(self, max_requests: int, max_pages_per_request: int, device: torch.device) -> None:
        shape = (max_requests + 1, max_pages_per_request)
        #: `[max_requests + 1, max_pages_per_request]` int32 on the device; row 0 is the padding row.
        self.page_table = torch.full(shape, NULL_PAGE, dtype=torch.int32, device=device)
        #: The same on the host. Ahead of the device until `flush`.
        self.page_table_cpu = np.full(shape, NULL_PAGE, dtype=np.int32)
        #: `[max_requests + 1]` tokens that each row has pages for, the step being prepared included.
        self.lengths = np.zeros(shape[0], dtype=np.int64)
        #: `[max_requests + 1]` pages that each row holds.
        self.num_pages = np.zeros(shape[0], dtype=np.int64)
        self._free_rows = list(range(max_requests, PADDING_ROW, -1))
        self._is_live = np.zeros(shape[0], dtype=np.bool_)
        self._is_dirty = np.zeros(shape[0], dtype=np.bool_)
        # A packed line is the row number and then its columns: one copy carries both.
        self._staging = StagingRing((shape[0], 1 + shape[1]), torch.int32, device)

    @property
    def max_requests(self) -> int:
        return len(self.lengths) - 1

    def add(self) -> int:
        if not self._free_rows:
            raise RunnerError(
                f"the request table is full ({self.max_requests} requests): release one, or raise "
                "runner.max_batch_size."
            )
        row = self._free_rows.pop()
        self._is_live[row] = True
        return row

    def append(self, row: int, pages: Sequence[int]) -> None:
        start = int(self.num_pages[row])
        self.page_table_cpu[row, start : start + len(pages)] = pages
        self.num_pages[row] += len(pages)
        self._is_dirty[row] = True

    def remove(self, row: int) -> list[int]:
        """Clear the row and return the pages it held."""
        self.check_live(row)
        pages: list[int] = self.page_table_cpu[row, : self.num_pages[row]].tolist()
        # Old columns must not survive: a captured kernel reads the full width of the table.
        self.page_table_cpu[row] = NULL_PAGE
        self.lengths[row] = self.num_pages[row] = 0
        self._is_live[row] = False
        self._is_dirty[row] = True
        self._free_rows.append(row)
        return pages

    def check_live(self, row: int) -> None:
        if not (0 <= row < len(self._is_live)) or not self._is_live[row]:
            raise RunnerError(f"row {row} of the request table is not in use.")

    def live_rows(self) -> npt.NDArray[np.int64]:
        return np.flatnonzero(self._is_live)

    def flush(self) -> None:
        """Copy the rows that changed to the device: one packed copy, queued on the current stream."""
        rows = np.flatnonzero(self._is_dirty)
        if len(rows) == 0:
            return
        packed = np.concatenate([rows[:, None].astype(np.int32), self.page_table_cpu[rows]], axis=1)
        lines = self._staging.upload(packed)
        self.page_table.index_copy_(0, lines[:, 0].long(), lines[:, 1:])
        self._is_dirty[:] = False
