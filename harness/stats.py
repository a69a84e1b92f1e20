"""Statistics of a series of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Samples = Sequence[float] | NDArray[np.float64]


def percentile(samples: Samples, q: float) -> float | None:
    """Return the q-th percentile (0 to 100, linear between samples); None without samples."""
    return float(np.percentile(samples, q)) if len(samples) else None


def rel_std(samples: Samples) -> float | None:
    """Return standard deviation over mean; None for fewer than two samples or a mean of 0."""
    mean = float(np.mean(samples)) if len(samples) > 1 else 0.0
    return float(np.std(samples)) / abs(mean) if mean else None


def rel_iqr(samples: Samples) -> float | None:
    """Return the interquartile range over the median; None for fewer than two samples or a median of 0."""
    if len(samples) < 2:
        return None
    low, median, high = np.percentile(samples, [25, 50, 75])
    return float((high - low) / abs(median)) if median else None


#: Fewer samples than these say too little: then those that another process disturbed count as well.
MIN_UNDISTURBED = 8


def undisturbed(is_disturbed: Sequence[bool | None]) -> list[int]:
    """Return the indices of the samples that count: those not disturbed, or all if these are too few."""
    clean = [index for index, disturbed in enumerate(is_disturbed) if not disturbed]
    return clean if len(clean) >= MIN_UNDISTURBED else list(range(len(is_disturbed)))
