"""How sure a comparison of two lists is: windows that the plan never saw, and the noise of the costs.

A list is judged on windows of the traffic after those it was fitted on. The interval resamples these
windows (in blocks, as requests near in time are alike) and draws the measured times anew from their
noise; both lists see the same windows and the same draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.planner.cost import CostTable
    from harness.planner.traffic import ListTraffic

_NUM_DRAWS = 2000
_CONFIDENCE = 0.95
#: Fewer windows with steps than this support no interval.
MIN_WINDOWS = 6
#: A gain or loss below a hundredth of a percent counts as zero: no interval makes it matter.
RESOLUTION = 1e-4
#: Beyond the measured KV tokens a time is its size's last one, and sizes end at different ones: a list could look
#: fast for what was not measured. With a larger share of such steps nothing is judged.
MAX_BEYOND_SHARE = 0.05


@dataclass(frozen=True)
class WindowTimes:
    """Time and number of the decode steps of one list, by window."""

    #: `[num_windows]`
    num_steps: NDArray[np.float64]
    #: `[num_windows]` of these, the steps with more KV tokens than were measured at their size.
    num_beyond: NDArray[np.float64]
    #: `[num_windows, num_measured]` ms, by the measured point (mode and size) that the time stems from.
    ms_by_point: NDArray[np.float64]
    points: tuple[tuple[str, int], ...]
    rel_error: NDArray[np.float64]

    @classmethod
    def of(cls, costs: CostTable, traffic: ListTraffic) -> WindowTimes:
        """Split each window's time by the measurements behind it."""
        steps = traffic.histogram.sum(axis=2).astype(np.float64)
        batch_ms = traffic.window_ns / 1e6
        points: dict[tuple[str, int], int] = {}
        shares: list[tuple[int, int, float]] = []
        num_beyond = np.zeros(len(steps))
        for batch_size in range(1, steps.shape[1]):
            plan = traffic.times.plans[batch_size]
            mode = "eager" if plan.mode == "eager" else "graph"
            surface = costs.eager if mode == "eager" else costs.graph
            parts = plan.sizes or (batch_size,)
            if not costs.source.is_log:
                row_tokens = traffic.times.grid.middles
                beyond = surface.is_beyond(parts[0], min(parts[0], batch_size) * row_tokens)
                num_beyond += traffic.histogram[:, batch_size, beyond].sum(axis=1)
            for size in parts:
                for neighbour, weight in surface.neighbours(size):
                    point = points.setdefault((mode, neighbour), len(points))
                    shares.append((batch_size, point, weight / len(parts)))
        share = np.zeros((steps.shape[1], len(points)))
        for batch_size, point, weight in shares:
            share[batch_size, point] += weight
        surfaces = {"graph": costs.graph, "eager": costs.eager}
        rel_error = np.array([surfaces[mode].points[size].rel_error for mode, size in points])
        return cls(steps.sum(axis=1), num_beyond, batch_ms @ share, tuple(points), rel_error)

    def step_ms(self, windows: slice) -> float | None:
        """Mean time of the decode steps of some windows; None without any."""
        steps = float(self.num_steps[windows].sum())
        return float(self.ms_by_point[windows].sum()) / steps if steps else None

    def beyond_share(self, windows: slice) -> float:
        """The part of the steps with more KV tokens than were measured."""
        return float(self.num_beyond[windows].sum() / max(self.num_steps[windows].sum(), 1.0))


@dataclass(frozen=True)
class Comparison:
    """By how much list A is faster than list B: `(B - A) / B` of their mean step times."""

    gain: float
    #: 95% interval; None with too few windows.
    interval: tuple[float, float] | None
    #: Of the list that has more of them, the part of the steps with more KV tokens than were measured.
    beyond_share: float

    @property
    def is_measured(self) -> bool:
        """False: too much of the times was never measured to tell the lists apart."""
        return self.beyond_share <= MAX_BEYOND_SHARE

    @property
    def is_better(self) -> bool:
        return self.is_measured and self.interval is not None and self.interval[0] > RESOLUTION

    @property
    def is_no_worse(self) -> bool:
        return self.is_measured and self.interval is not None and self.interval[0] >= -RESOLUTION

    @property
    def is_worse(self) -> bool:
        return self.is_measured and self.interval is not None and self.interval[1] < -RESOLUTION


def compare(a: WindowTimes, b: WindowTimes, windows: slice, seed: int = 0) -> Comparison | None:
    """Compare two lists on `windows`; None if either ran no step there."""
    a_ms, b_ms = a.step_ms(windows), b.step_ms(windows)
    if a_ms is None or b_ms is None:
        return None
    interval = None
    if int(((a.num_steps[windows] > 0) & (b.num_steps[windows] > 0)).sum()) >= MIN_WINDOWS:
        interval = _interval(a, b, windows, np.random.default_rng(seed))
    return Comparison(1 - a_ms / b_ms, interval, max(times.beyond_share(windows) for times in (a, b)))


def _interval(
    a: WindowTimes, b: WindowTimes, windows: slice, rng: np.random.Generator
) -> tuple[float, float]:
    num_windows = len(a.num_steps[windows])
    counts = rng.multinomial(num_windows, np.full(num_windows, 1 / num_windows), _NUM_DRAWS)
    noise = {point: rng.standard_normal(_NUM_DRAWS) for point in sorted({*a.points, *b.points})}
    a_ms, b_ms = (_draws(times, windows, counts, noise) for times in (a, b))
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(1 - a_ms / b_ms, (tail, 1 - tail))
    return float(low), float(high)


def _draws(
    times: WindowTimes,
    windows: slice,
    counts: NDArray[np.int64],
    noise: dict[tuple[str, int], NDArray[np.float64]],
) -> NDArray[np.float64]:
    """`[num_draws]` mean step times."""
    factors = 1 + np.stack([noise[point] for point in times.points], axis=1) * times.rel_error
    total_ms = ((counts @ times.ms_by_point[windows]) * factors).sum(axis=1)
    mean_ms: NDArray[np.float64] = total_ms / np.maximum(counts @ times.num_steps[windows], 1)
    return mean_ms
