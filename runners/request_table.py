"""Which pages each request holds, on the host and on the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from runners.errors import RunnerError
from runners.page_pool import NULL_PAGE
from runners.staging import CopyFences, Upload

#: The reserved row of the request table. All its columns are `NULL_PAGE`.
PADDING_ROW = 0
#: Changed entries of the table that one copy carries. A decode step of 256 requests opens 16 pages of 16
#: tokens: the few of such steps have a copy of their own, since what a copy holds is written by a host whose
#: caches have gone cold. The many are for arrivals and ends.
_FEW_ENTRIES, _MANY_ENTRIES = 64, 1024
#: So many pages that no column is the next one.
_NOT_IN_USE = -(2**31)
#: Uploads that may be queued before `flush` waits.
_QUEUED_UPLOADS = 8


class RequestTable:
    """Row of a request → its pages, on the host and on the device."""

    def __init__(self, max_requests: int, max_pages_per_request: int, device: torch.device) -> None:
        shape = (max_requests + 1, max_pages_per_request)
        #: `[max_requests + 1, max_pages_per_request]` int32 on the device; row 0 is the padding row.
        self.page_table = torch.full(shape, NULL_PAGE, dtype=torch.int32, device=device)
        #: The same on the host. Ahead of the device until `flush`.
        self.page_table_cpu = np.full(shape, NULL_PAGE, dtype=np.int32)
        self._flat_cpu = self.page_table_cpu.reshape(-1)
        #: `[max_requests + 1]` tokens that each row has pages for, the step being prepared included.
        self.lengths = np.zeros(shape[0], dtype=np.int64)
        #: `[max_requests + 1]` pages that each row holds, or `_NOT_IN_USE`.
        self.num_pages = np.full(shape[0], _NOT_IN_USE, dtype=np.int64)
        self._free_rows = list(range(max_requests, PADDING_ROW, -1))
        self._is_live = np.zeros(shape[0], dtype=np.bool_)
        #: Flat index of each entry that the device does not know yet → its page.
        self._changes: dict[int, int] = {}
        #: Whether the next step may read one of them, and whether some are pages that `open` gave out.
        self._is_urgent = self._has_opened = False
        self._width = max_pages_per_request
        self._flat_table = self.page_table.view(-1)
        self._few = _EntryUploads(device, _FEW_ENTRIES)
        self._many = _EntryUploads(device, _MANY_ENTRIES)

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
        self.num_pages[row] = 0
        return row

    def append(self, row: int, pages: Sequence[int]) -> None:
        start = int(self.num_pages[row])
        self.page_table_cpu[row, start : start + len(pages)] = pages
        self.num_pages[row] += len(pages)
        self._changes.update(enumerate(pages, row * self._width + start))
        self._is_urgent = True

    def open(self, rows: npt.NDArray[np.int32], columns: npt.NDArray[np.int32], pages: Sequence[int]) -> None:
        """Append one page to each of some different rows, at its next column, for a token of the next step."""
        # Those of another step that never came: the next one reads them.
        self._is_urgent |= self._has_opened
        self._has_opened = True
        entries = rows * self._width + columns
        self._flat_cpu[entries] = pages
        self.num_pages.put(rows, columns + 1)
        self._changes.update(zip(entries.tolist(), pages, strict=True))

    def remove(self, row: int) -> list[int]:
        """Clear the row and return the pages it held."""
        self.check_live(row)
        held = int(self.num_pages[row])
        pages: list[int] = self.page_table_cpu[row, :held].tolist()
        # Old columns must not survive: a captured kernel reads the full width of the table.
        self.page_table_cpu[row, :held] = NULL_PAGE
        self._changes.update(enumerate(repeat(NULL_PAGE, held), row * self._width))
        self.lengths[row], self.num_pages[row] = 0, _NOT_IN_USE
        self._is_live[row] = False
        self._free_rows.append(row)
        return pages

    def check_live(self, row: int) -> None:
        if not (0 <= row < len(self._is_live)) or not self._is_live[row]:
            raise RunnerError(f"row {row} of the request table is not in use.")

    def live_rows(self) -> npt.NDArray[np.int64]:
        return np.flatnonzero(self._is_live)

    def pages(self, rows: npt.NDArray[Any], columns: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Pages in these columns of these rows, on the host; both must lie within the table."""
        return self._flat_cpu.take(rows * self._width + columns)

    def cover(self, rows: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> None:
        """Raise `lengths` of these rows to the numbers given, those of a row in ascending order."""
        self.lengths.put(rows, np.maximum(self.lengths.take(rows), lengths))

    def flush(self) -> None:
        """Copy the entries that changed to the device, packed, queued on the current stream."""
        self._is_urgent = self._has_opened = False
        if not self._changes:
            return
        count = len(self._changes)
        indices = np.fromiter(self._changes.keys(), np.int64, count)
        pages = np.fromiter(self._changes.values(), np.int32, count)
        self._changes.clear()
        uploads = self._few if count <= _FEW_ENTRIES else self._many
        for start in range(0, count, uploads.num_entries):
            end = start + uploads.num_entries
            self._flat_table.index_copy_(0, *uploads.upload(indices[start:end], pages[start:end]))

    def flush_urgent(self) -> None:
        """`flush`, unless what changed is only what `open` gave out for this step, and rows that have gone.

        The step must not look at the entries of the pages that its own tokens open. They are flushed by
        `settle` after its launch; if that does not happen, ahead of whatever step comes next.
        """
        if self._is_urgent:
            self.flush()
        elif self._changes:
            self._is_urgent = True

    def settle(self) -> None:
        """Flush, after a launch, what is left, and note which host buffers the copies read."""
        self.flush()
        self._few.fences.settle()
        self._many.fences.settle()


class _EntryUploads:
    """Brings up to `num_entries` of the table to the device in one copy; the rest rewrites entry 0.

    Of fixed size, because cutting tensors to length costs the host more than the copy of what is left.
    Entry 0 belongs to the padding row: its page is always `NULL_PAGE`.
    """

    def __init__(self, device: torch.device, num_entries: int) -> None:
        self.num_entries = num_entries
        self.fences = CopyFences(_QUEUED_UPLOADS, device)
        num_bytes = num_entries * (8 + 4)
        self._hosts = [
            torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
            for _ in range(_QUEUED_UPLOADS)
        ]
        self._arrays = [tuple(part.numpy() for part in _parts(host)) for host in self._hosts]
        #: Entries that each host buffer holds, beyond which it rewrites entry 0.
        self._counts = [0] * _QUEUED_UPLOADS
        self._target = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._target_parts = _parts(self._target)
        self._uploads = [Upload(self._target, host) for host in self._hosts]

    def upload(
        self, indices: npt.NDArray[np.int64], pages: npt.NDArray[np.int32]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the device's indices and pages, valid until the next upload."""
        turn, count = self.fences.next_turn(), len(indices)
        host_indices, host_pages = self._arrays[turn]
        host_indices[:count], host_pages[:count] = indices, pages
        stale, self._counts[turn] = self._counts[turn], count
        if stale > count:
            host_indices[count:stale], host_pages[count:stale] = 0, NULL_PAGE
        self._uploads[turn].queue()
        return self._target_parts


def _parts(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the int64 indices and the int32 pages of a packed buffer."""
    split = packed.nbytes // 12 * 8
    return packed[:split].view(torch.int64), packed[split:].view(torch.int32)
