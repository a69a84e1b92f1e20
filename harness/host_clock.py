"""Durations of device work by the host clock: none exists before the device was waited for.

A launch returns before its work is done, so a clock read after it measures the launch. Here a duration
ends with an `Arrival`, and making one waits: a timing without synchronisation cannot be written down.
"""

from __future__ import annotations

import time
from typing import Generic, Protocol, TypeVar

import torch

Value = TypeVar("Value", covariant=True)


class Pending(Protocol[Value]):
    """Work given to the device."""

    def read(self) -> Value:
        """Wait until the device has done it, and return what came of it."""
        ...


class Instant:
    """Now, on the host clock. Two of them have no difference: see `Arrival`."""

    __slots__ = ("_ns",)

    def __init__(self) -> None:
        self._ns = time.perf_counter_ns()

    def or_later(self, other: Instant | None) -> Instant:
        """Return the later of the two."""
        return self if other is None or other._ns < self._ns else other


class Arrival(Instant, Generic[Value]):
    """The instant at which pending work was done, and its `value`."""

    __slots__ = ("value",)

    def __init__(self, pending: Pending[Value]) -> None:
        self.value = pending.read()
        super().__init__()

    def ms_since(self, start: Instant) -> float:
        """Return the time from `start` to here in ms."""
        return (self._ns - start._ns) / 1e6


class DeviceWork:
    """Everything that was given to a device so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> None:
        """Wait for it; on a CPU it is done when the call that gave it returns."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
