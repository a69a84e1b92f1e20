"""Measured step times by size and KV tokens, and what may be read between them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Standard error of a median over that of a mean, for normal samples.
_MEDIAN_ERROR = 1.2533


@dataclass(frozen=True)
class SizePoints:
    """What was measured at one size."""

    #: `[num_points]` KV tokens of the step, increasing, and its median time in ms.
    num_kv_tokens: NDArray[np.float64]
    step_ms: NDArray[np.float64]
    #: Relative standard error of the times: the noise of the samples over the root of their number.
    rel_error: float


class StepSurface:
    """Step time in one mode. Linear between measured neighbours, in size and in KV tokens.

    A size between two measured ones takes their times at the same KV tokens a row. Outside the KV
    tokens measured at a size the end value is held, and `is_beyond` says where that is too low; outside
    the measured sizes there is no time, and asking for one is an error.
    """

    def __init__(self, points: Mapping[int, SizePoints]) -> None:
        self.points = dict(sorted(points.items()))
        self.sizes = tuple(self.points)

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[Mapping[str, Any]],
        mode: str,
        column: str = "step_ms_p50",
        with_padding: bool = True,
    ) -> StepSurface:
        """Read `column` of the rows of `sizes.csv` that ran in `mode`; rows without a time are left out.

        Batches with padding rows give further points of their size, unless `with_padding` is False. A size
        whose noise is not known is taken to be as noisy as the noisiest.
        """
        by_size: dict[int, list[Mapping[str, Any]]] = {}
        for row in rows:
            size = int(row["padded_batch_size"])
            if (
                row["mode"] == mode
                and time_of(row, column) is not None
                and (with_padding or row["batch_size"] == size)
            ):
                by_size.setdefault(size, []).append(row)
        errors = {
            size: [_rel_error(row, column) for row in group if row[column] is not None]
            for size, group in by_size.items()
        }
        worst = max((error for found in errors.values() for error in found), default=0.0)
        return cls(
            {
                size: _size_points(group, column, max(errors[size], default=worst))
                for size, group in by_size.items()
            }
        )

    def __bool__(self) -> bool:
        return bool(self.sizes)

    def covers(self, size: int) -> bool:
        """Whether the size was measured or lies between measured ones."""
        return bool(self.sizes) and self.sizes[0] <= size <= self.sizes[-1]

    def is_measured(self, size: int) -> bool:
        return size in self.points

    def neighbours(self, size: int) -> tuple[tuple[int, float], ...]:
        """The measured sizes that give the size's time, with their weights (one, or two that sum to 1)."""
        assert self.covers(size), f"size {size} is outside the measured {self.sizes[:1]}..{self.sizes[-1:]}"
        index = bisect_left(self.sizes, size)
        high = self.sizes[index]
        if high == size:
            return ((size, 1.0),)
        low = self.sizes[index - 1]
        share = (size - low) / (high - low)
        return ((low, 1 - share), (high, share))

    def step_ms(self, size: int, num_kv_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Time in ms of steps of `size` rows that attend to `num_kv_tokens` tokens (any shape)."""
        total = np.zeros_like(num_kv_tokens, dtype=np.float64)
        for neighbour, weight in self.neighbours(size):
            at = self.points[neighbour]
            total += weight * np.interp(num_kv_tokens * (neighbour / size), at.num_kv_tokens, at.step_ms)
        return total

    def is_beyond(self, size: int, num_kv_tokens: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Whether the time is the last value, held beyond the KV tokens that were measured."""
        most = [self.points[near].num_kv_tokens[-1] * size / near for near, _ in self.neighbours(size)]
        return np.asarray(num_kv_tokens > min(most))


def time_of(row: Mapping[str, Any], column: str) -> float | None:
    """Return the time in ms of a row of `sizes.csv`; None if it has none.

    Where the card was throttled throughout no isolated sample stands: the device's time is then the one of
    steps in a row, which are taken whatever the card says.
    """
    value = row[column]
    if value is None and column == "replay_ms_p50" and row["mode"] == "graph":
        value = row.get("back_to_back_ms")
    return None if value is None else float(value)


def _size_points(rows: list[Mapping[str, Any]], column: str, rel_error: float) -> SizePoints:
    """Merge rows that have the same KV tokens by their mean."""
    tokens = np.array([row["num_kv_tokens"] for row in rows], dtype=np.float64)
    step_ms = np.array([time_of(row, column) for row in rows], dtype=np.float64)
    unique, inverse = np.unique(tokens, return_inverse=True)
    mean = np.bincount(inverse, weights=step_ms) / np.bincount(inverse)
    return SizePoints(unique, mean, rel_error)


def _rel_error(row: Mapping[str, Any], column: str) -> float:
    """The noise of the samples, and, of a point measured in several rounds, by how much these differ."""
    prefix = "replay_" if column.startswith("replay") else ""
    rel_std, num_samples = row.get(f"{prefix}rel_std"), row.get("num_samples")
    between = (row.get(f"{prefix}round_std") or 0.0) / np.sqrt(2)
    if rel_std is None or not num_samples:
        return float(between)
    return float(np.hypot(_MEDIAN_ERROR * rel_std / np.sqrt(num_samples), between))
