"""Times the device region of a step: events on the stream, or the host clock without CUDA."""

from __future__ import annotations

import time
from typing import Protocol

import torch


class Stopwatch(Protocol):
    """Marks the start and the end of the work that a step gives to the device."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def elapsed_ms(self) -> float:
        """Return the time between the marks in ms; waits for the second one."""
        ...

    def idle_ms_after(self, before: Stopwatch) -> float:
        """Return the time from the end of `before` (of the same kind) to this start, in ms.

        What the device did in between is not the step's own work: copies that no graph does, or nothing.
        """
        ...


class CudaStopwatch:
    """Two events on the current stream: nothing waits until the result is asked for."""

    def __init__(self) -> None:
        self._start = torch.cuda.Event(enable_timing=True)
        self._stop = torch.cuda.Event(enable_timing=True)

    def start(self) -> None:
        self._start.record()

    def stop(self) -> None:
        self._stop.record()

    def elapsed_ms(self) -> float:
        self._stop.synchronize()
        return float(self._start.elapsed_time(self._stop))

    def idle_ms_after(self, before: Stopwatch) -> float:
        assert isinstance(before, CudaStopwatch)
        self._start.synchronize()
        return float(before._stop.elapsed_time(self._start))


class HostStopwatch:
    """The host clock: right where the work is done by the time the call returns."""

    def __init__(self) -> None:
        self._start_ns = 0
        self._stop_ns = 0

    def start(self) -> None:
        self._start_ns = time.perf_counter_ns()

    def stop(self) -> None:
        self._stop_ns = time.perf_counter_ns()

    def elapsed_ms(self) -> float:
        return (self._stop_ns - self._start_ns) / 1e6

    def idle_ms_after(self, before: Stopwatch) -> float:
        assert isinstance(before, HostStopwatch)
        return (self._start_ns - before._stop_ns) / 1e6


def create_stopwatch(device: torch.device) -> Stopwatch:
    """Return the stopwatch that fits `device`."""
    return CudaStopwatch() if device.type == "cuda" else HostStopwatch()
