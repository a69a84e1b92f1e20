"""How sure a median of step times is: a block bootstrap for series whose samples resemble their neighbours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Series = NDArray[np.float64]

_NUM_RESAMPLES = 400
#: More samples are thinned evenly for the resampling: that can only widen the interval, and 300 samples
#: that scatter by 5% leave a median uncertain by 0.4%.
_MAX_SAMPLES = 300
#: A series that drifts as a whole still gives this many blocks to draw from.
_MIN_BLOCKS = 4
#: Interquartile range of a standard normal variable.
_NORMAL_IQR = 1.349


@dataclass(frozen=True)
class MedianError:
    """The median of a series and its standard error on the log scale, so 0.01 is 1%.

    `num_blocks` is the number of independent stretches that the series is worth, `spread` the standard
    deviation of its samples, by the middle half.
    """

    median: float
    log_error: float
    num_blocks: int
    spread: float = 0.0


def median_error(samples: Series, seed: int = 0) -> MedianError:
    """Return the median of a series in the order of measuring, and how uncertain it is.

    Circular block bootstrap (Politis and Romano, 1992): whole stretches are drawn, so that what slow
    noise does to the median is not averaged away. Fewer than two samples give an infinite error.
    """
    if len(samples) < 2:
        return MedianError(float(np.median(samples)) if len(samples) else math.nan, math.inf, 1)
    thinned = samples[:: -(-len(samples) // _MAX_SAMPLES)]
    length = block_length(thinned)
    num_blocks = len(thinned) // length
    medians = _resampled_medians(thinned, length, np.random.default_rng(seed))
    # Of few blocks, resampling shows too little of the spread: that of n values seen from their own mean.
    spread = float(np.log(medians).std(ddof=1)) * math.sqrt(num_blocks / max(1, num_blocks - 1))
    low, high = np.percentile(samples, (25, 75))
    return MedianError(
        median=float(np.median(samples)),
        log_error=max(spread, _shift_within(samples) / 2),
        num_blocks=num_blocks,
        spread=math.log(high / low) / _NORMAL_IQR,
    )


def pooled(runs: Sequence[MedianError]) -> MedianError:
    """Return the median of several runs of one thing: the geometric mean of theirs, surer by their number."""
    if len(runs) == 1:
        return runs[0]
    variance = sum(run.log_error**2 for run in runs) / len(runs) ** 2
    return MedianError(
        median=math.exp(sum(math.log(run.median) for run in runs) / len(runs)),
        log_error=math.sqrt(variance),
        num_blocks=sum(run.num_blocks for run in runs),
        spread=math.sqrt(sum(run.spread**2 for run in runs) / len(runs)),
    )


def _shift_within(samples: Series) -> float:
    """How far apart the two halves of a series lie, on the log scale.

    A step or a slow wander leaves too few independent stretches for any bootstrap: the median then sits
    on one of two levels, and another run may sit on the other.
    """
    middle = len(samples) // 2
    return abs(math.log(float(np.median(samples[middle:])) / float(np.median(samples[:middle]))))


def block_length(samples: Series) -> int:
    """Return the length of stretch that makes neighbouring stretches nearly independent.

    Twice the integrated autocorrelation time of the ranks (an outlier cannot hide a drift from ranks),
    summed while pairs of lags stay positive (Geyer, 1992).
    """
    num_samples = len(samples)
    longest = max(1, num_samples // _MIN_BLOCKS)
    ranks = samples.argsort(kind="stable").argsort(kind="stable").astype(np.float64)
    centred = ranks - ranks.mean()
    variance = float(centred @ centred)
    if samples.min() == samples.max() or variance == 0:
        return 1
    time = 1.0
    for lag in range(1, longest, 2):
        pair = sum(float(centred[k:] @ centred[:-k]) for k in (lag, lag + 1)) / variance
        if pair <= 2 * _noise_of_pair(num_samples):
            break
        time += 2 * pair
    return min(longest, max(1, math.ceil(2 * time - 1)))


def _noise_of_pair(num_samples: int) -> float:
    """Standard deviation of the sum of two autocorrelations of independent samples."""
    return math.sqrt(2 / num_samples)


def _resampled_medians(samples: Series, length: int, rng: np.random.Generator) -> Series:
    num_samples = len(samples)
    starts = rng.integers(0, num_samples, (_NUM_RESAMPLES, -(-num_samples // length)))
    index = (starts[:, :, None] + np.arange(length)) % num_samples
    drawn = samples[index.reshape(_NUM_RESAMPLES, -1)[:, :num_samples]]
    medians: Series = np.median(drawn, axis=1)
    return medians


def student_quantile(probability: float, degrees: float) -> float:
    """Return the quantile of Student's t for 0.5 < `probability` < 1 and `degrees` ≥ 1 of freedom.

    With x = √degrees · tan θ the density of t becomes cos(θ)^(degrees - 1), summed here over θ.
    """
    edges = np.linspace(0, math.pi / 2, 20_001)
    share = np.concatenate([[0.0], np.cumsum(np.cos((edges[1:] + edges[:-1]) / 2) ** (degrees - 1))])
    theta = float(np.interp(2 * probability - 1, share / share[-1], edges))
    return math.sqrt(degrees) * math.tan(theta)
