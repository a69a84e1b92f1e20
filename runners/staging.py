"""Host buffers from which a queued copy may still read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import torch


class StagingRing:
    """Uploads host arrays through a few host buffers in turn, pinned where the target is CUDA.

    A buffer is written again only after the copy that reads it has run (an event says so): without
    that, the device would receive the next step's numbers.

    Args:
        shape: the largest array of one upload; smaller ones use its first lines.
        dtype: of the buffers.
        device: the target.
        depth: uploads that may be queued before `upload` has to wait.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, depth: int = 2
    ) -> None:
        self._on_cuda = device.type == "cuda"
        self._buffers = [torch.zeros(shape, dtype=dtype, pin_memory=self._on_cuda) for _ in range(depth)]
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        make_event: Callable[[], torch.cuda.Event] = torch.cuda.Event
        self._events = [make_event() for _ in range(depth)] if self._on_cuda else []
        self._target = torch.zeros(shape, dtype=dtype, device=device)
        self._turn = 0

    @property
    def pinned_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers) if self._on_cuda else 0

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Queue the copy of `array`; the returned device view is valid until the next upload."""
        turn, n = self._turn, len(array)
        self._turn = (turn + 1) % len(self._buffers)
        if self._on_cuda:
            self._events[turn].synchronize()
        self._arrays[turn][:n] = array
        view = self._target[:n].copy_(self._buffers[turn][:n], non_blocking=True)
        if self._on_cuda:
            self._events[turn].record()
        return view
