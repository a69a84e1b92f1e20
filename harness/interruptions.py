"""What can end a job from outside, turned into exceptions that the job can record.

Like KeyboardInterrupt they are no `Exception`: code that wraps errors must not take them for its own.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

#: A second signal within this time of the first is ignored.
_WIND_DOWN_S = 5.0
#: The time limit raises again after this time: a destructor or a weak reference's callback may swallow it.
_AGAIN_S = 10.0


class JobTimeoutError(BaseException):
    """The job ran longer than `job.timeout_s`."""


class JobKilledError(BaseException):
    """The process was asked to end by a signal."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(f"the job was ended by {signal_name}")
        self.signal_name = signal_name


class Interruptions:
    """Owns the signals that can end a job, from its first phase to its last word; gives them back at the end.

    Inside `raised` the first one raises; what follows within seconds, while the job winds down, is ignored,
    and so is all between two such blocks: a second Ctrl-C must not cut the record short. Only the main
    thread can receive signals; elsewhere nothing is raised or ignored, and there is no time limit.
    """

    def __init__(self) -> None:
        self._is_main_thread = threading.current_thread() is threading.main_thread()
        self._handlers: dict[int, Any] = {}
        self._is_raising = False
        self._raised_s = -math.inf
        self._timeout_s: float | None = None

    def __enter__(self) -> Self:
        if self._is_main_thread:
            # Also SIGINT, which a script's shell makes commands started with `&` ignore.
            numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
            self._handlers = {number: signal.signal(number, self._on_signal) for number in numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            # None: a handler that was not installed from Python, and cannot be from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @contextmanager
    def raised(self, timeout_s: float | None = None) -> Iterator[None]:
        """Raise KeyboardInterrupt, JobKilledError or, after `timeout_s`, JobTimeoutError inside the block."""
        if not self._is_main_thread:
            yield
            return
        self._timeout_s, self._raised_s = timeout_s, -math.inf
        try:
            self._is_raising = True
            signal.setitimer(signal.ITIMER_REAL, timeout_s or 0.0, _AGAIN_S)
            yield
        finally:
            self._is_raising = False
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        # NOTE: not ignored for good, as whatever runs just now may swallow the exception (a destructor does).
        if not self._is_raising or now_s - self._raised_s < _WIND_DOWN_S:
            return
        self._raised_s = now_s
        if number == signal.SIGALRM:
            raise JobTimeoutError(
                f"the job was still running after job.timeout_s={self._timeout_s:g} seconds; raise it, or "
                "measure less: measure=quick, fewer capture sizes, workload.max_requests"
            )
        if number == signal.SIGTERM:
            raise JobKilledError(signal.Signals(number).name)
        raise KeyboardInterrupt("interrupted by Ctrl-C (SIGINT)")
