"""What can end a job from outside, turned into exceptions that the job can record.

Like KeyboardInterrupt they are no `Exception`: code that wraps errors must not take them for its own.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class JobTimeoutError(BaseException):
    """The job ran longer than `job.timeout_s`."""


class JobKilledError(BaseException):
    """The process was asked to end by a signal."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(f"the job was ended by {signal_name}")
        self.signal_name = signal_name


@contextmanager
def interruptions_raised(timeout_s: float | None) -> Iterator[None]:
    """Raise JobTimeoutError or JobKilledError inside the block; restores the handlers afterwards.

    Only the main thread can receive signals; elsewhere the block runs without a time limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_alarm(number: int, frame: FrameType | None) -> None:
        raise JobTimeoutError(
            f"the job was still running after job.timeout_s={timeout_s:g} seconds; raise it, or measure less: "
            "measure=quick, fewer capture sizes, workload.max_requests"
        )

    def on_term(number: int, frame: FrameType | None) -> None:
        raise JobKilledError(signal.Signals(number).name)

    before = {
        signal.SIGALRM: signal.signal(signal.SIGALRM, on_alarm),
        signal.SIGTERM: signal.signal(signal.SIGTERM, on_term),
    }
    signal.setitimer(signal.ITIMER_REAL, timeout_s or 0.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in before.items():
            signal.signal(number, handler)
