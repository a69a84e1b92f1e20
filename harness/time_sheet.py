"""Where the wall time of a phase goes, part by part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class TimeSheet:
    """Books stretches of wall time under names. Stretches do not nest."""

    def __init__(self, timer_s: Callable[[], float] = time.perf_counter) -> None:
        self._timer_s = timer_s
        self._started_s = timer_s()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def book(self, name: str) -> Iterator[None]:
        """Count what the block takes as `name`."""
        before_s = self._timer_s()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._timer_s() - before_s

    def seconds(self) -> dict[str, float]:
        """Return `wall_s` since the sheet was made, `{name}_s` of each part, and `other_s`, the rest."""
        wall_s = self._timer_s() - self._started_s
        parts = {f"{name}_s": seconds for name, seconds in self._seconds.items()}
        return {"wall_s": wall_s, **parts, "other_s": wall_s - sum(parts.values())}
