"""The signals by which people, terminals and clusters end a sweep, as exceptions: rows are written before the end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class CancelledError(KeyboardInterrupt):
    """Ended by SIGTERM, by which a cluster cancels a job."""


@contextmanager
def ending_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Give `handler` the signals that end a sweep, inside the block: SIGINT, SIGTERM and a closed terminal.

    SIGINT also where a script's shell makes commands started with `&` ignore it: it is how a sweep is ended.
    What `nohup` has ignored stays so. Only the main thread can receive signals; elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            # None: a handler that was not installed from Python, and cannot be from here.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)


@contextmanager
def cancellation_raised() -> Iterator[None]:
    """Raise CancelledError for SIGTERM inside the block, KeyboardInterrupt for the others of `ending_signals`."""
    with ending_signals(_raise):
        yield


def _raise(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGTERM:
        raise CancelledError("cancelled by SIGTERM")
    raise KeyboardInterrupt(f"interrupted by {signal.Signals(number).name}")
