"""When to start counting samples, and when there are enough of them.

A mean can be quiet while single samples are wild, and the middle half can be quiet while the tail is
not: so two measures of noise must both be low, the relative standard deviation and the relative IQR.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable
from statistics import median


class WarmUp:
    """Runs samples in until their level is stable; they are never counted.

    Stable means that the medians of the last two windows differ by at most `tolerance`, relatively. The
    window is even, so that a series that alternates between two values has one level.
    """

    def __init__(
        self, num_warmup: int = 0, tolerance: float = 0.05, window: int = 4, max_samples: int = 200
    ) -> None:
        self._num_warmup = num_warmup
        self._tolerance = tolerance
        self._window = window
        self._max_samples = max_samples
        self._recent: deque[float] = deque(maxlen=2 * window)
        self.num_samples = 0

    def add(self, sample_ms: float) -> None:
        self._recent.append(sample_ms)
        self.num_samples += 1

    @property
    def done(self) -> bool:
        return self.num_samples >= self._num_warmup and (self.stable or self.num_samples >= self._max_samples)

    @property
    def stable(self) -> bool:
        if len(self._recent) < 2 * self._window:
            return False
        samples = list(self._recent)
        before, after = median(samples[: self._window]), median(samples[self._window :])
        return abs(after - before) <= self._tolerance * abs(before)

    @property
    def unmet_condition(self) -> str | None:
        """What keeps the level from being stable, also when the caller ends the warm-up; else None."""
        return None if self.stable else f"warm-up not stable after {self.num_samples} samples"


class StoppingRule:
    """Says when a series of samples is long and quiet enough, or has run out of time.

    `done` once there are `min_samples` samples, `min_time_s` of measured time and both noises are at
    most `max_noise`; or once `timeout_s` have passed since the rule was made. `unmet_condition` then
    names what was missing, and is None when nothing was.
    """

    def __init__(
        self,
        min_samples: int,
        min_time_s: float,
        max_noise: float,
        timeout_s: float,
        timer_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._min_samples = min_samples
        self._min_time_s = min_time_s
        self._max_noise = max_noise
        self._timer_s = timer_s
        self._deadline_s = timer_s() + timeout_s
        self._sorted_ms: list[float] = []
        self._sum_ms = 0.0
        self._mean_ms = 0.0
        self._squares = 0.0  # sum of squared differences from the mean (Welford)
        self._timed_out = False

    def add(self, sample_ms: float) -> None:
        insort(self._sorted_ms, sample_ms)
        self._sum_ms += sample_ms
        difference = sample_ms - self._mean_ms
        self._mean_ms += difference / len(self._sorted_ms)
        self._squares += difference * (sample_ms - self._mean_ms)
        self._timed_out = self._timer_s() >= self._deadline_s

    @property
    def num_samples(self) -> int:
        return len(self._sorted_ms)

    @property
    def done(self) -> bool:
        return self.timed_out or not self._unmet()

    @property
    def timed_out(self) -> bool:
        """Whether the time was up, also when no sample came in since."""
        return self._timed_out or self._timer_s() >= self._deadline_s

    @property
    def unmet_condition(self) -> str | None:
        return "; ".join(self._unmet()) or None

    @property
    def rel_std(self) -> float | None:
        if self.num_samples < 2 or not self._mean_ms:
            return None
        return float((self._squares / self.num_samples) ** 0.5 / abs(self._mean_ms))

    @property
    def rel_iqr(self) -> float | None:
        if self.num_samples < 2 or not (middle := self._quantile(0.5)):
            return None
        return (self._quantile(0.75) - self._quantile(0.25)) / abs(middle)

    def _unmet(self) -> list[str]:
        unmet = []
        if self.num_samples < self._min_samples:
            unmet.append(f"num_samples {self.num_samples} < min_samples {self._min_samples}")
        if self._sum_ms < self._min_time_s * 1e3:
            unmet.append(f"measured {self._sum_ms / 1e3:.3g} s < min_time_s {self._min_time_s:g}")
        for name, noise in (("rel_std", self.rel_std), ("rel_iqr", self.rel_iqr)):
            if noise is None or noise > self._max_noise:
                text = "unknown" if noise is None else f"{noise:.3g}"
                unmet.append(f"{name} {text} > max_noise {self._max_noise:g}")
        return unmet

    def _quantile(self, q: float) -> float:
        """Linear between samples, as numpy's percentile."""
        position = q * (self.num_samples - 1)
        below = int(position)
        above = min(below + 1, self.num_samples - 1)
        low = self._sorted_ms[below]
        return low + (self._sorted_ms[above] - low) * (position - below)
