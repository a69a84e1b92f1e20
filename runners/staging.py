"""Host buffers from which a queued copy may still read, and the copies."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch


class CopyFences:
    """Turns over a few host buffers: one is handed out again only once the copies from it have run.

    Without that the device would receive the next step's numbers. The event of a turn is recorded by
    `settle`, at the latest when the next turn begins: so a step may queue its copies, launch its graph,
    and only then spend the time. An event recorded late waits for more than it must, never for less.
    `settle` also asks whether the buffer of the next turn is free: if it is, that turn calls no driver.

    Args:
        depth: turns, and so the copies that may be queued before `next_turn` has to wait.
        device: where the copies go; nothing to wait for unless it is CUDA.
    """

    def __init__(self, depth: int, device: torch.device) -> None:
        self._events = [torch.cuda.Event() for _ in range(depth)] if device.type == "cuda" else []
        self._depth = depth
        self._turn = 0
        self._is_settled = True
        #: Whether the copies from the next turn's buffer are known to have run. Only while settled.
        self._is_next_free = True

    def next_turn(self) -> int:
        """Return the number of the buffer to write next, once no queued copy reads it."""
        if not self._is_settled:
            self.settle()
        self._turn = turn = (self._turn + 1) % self._depth
        self._is_settled = False
        if not self._is_next_free:
            self._events[turn].synchronize()
        return turn

    def settle(self) -> None:
        """Mark what this turn's buffer feeds: everything queued on the current stream until now."""
        if self._is_settled:
            return
        self._is_settled = True
        if self._events:
            self._events[self._turn].record()
            self._is_next_free = self._events[(self._turn + 1) % self._depth].query()


class Upload:
    """A copy from one host buffer to one device buffer, to be queued again and again.

    From pinned memory it is the driver's call alone, with arguments made once: torch's own copy costs the
    host several times as much, cold caches above all. The buffers must outlive the copies (`CopyFences`).

    Args:
        target: contiguous, on the device.
        source: contiguous, of the same size, on the host; pinned if the target is on a CUDA device.
    """

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.nbytes == source.nbytes and target.is_contiguous() and source.is_contiguous()
        self._target, self._source = target, source
        self._copy = _driver_copy() if target.is_cuda and source.is_pinned() else None
        self._stream = 0
        self._args = (
            ctypes.c_uint64(target.data_ptr()),
            ctypes.c_void_p(source.data_ptr()),
            ctypes.c_size_t(source.nbytes),
            ctypes.c_void_p(self._stream),
        )
        self._device_index = target.get_device()

    def queue(self) -> None:
        """Queue the copy on the current stream."""
        if self._copy is None:
            self._target.copy_(self._source, non_blocking=True)
            return
        stream = torch._C._cuda_getCurrentRawStream(self._device_index)
        if stream != self._stream:
            self._stream, self._args = stream, (*self._args[:3], ctypes.c_void_p(stream))
        status = self._copy(*self._args)
        if status != 0:
            raise RuntimeError(
                f"the CUDA driver refused a copy of {self._source.nbytes} bytes: error {status}."
            )


@cache
def _driver_copy() -> Any:
    """Return the driver's asynchronous copy from host to device, or None where it cannot be had."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuMemcpyHtoDAsync_v2
    except (OSError, AttributeError):
        return None
