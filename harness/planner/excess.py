"""What it adds to a step that its requests are not alike: measured rates by size.

A decode kernel gives each request its own programs. They share the memory's bandwidth, which the sum of
the KV tokens tells; but the longest request goes on alone when the others are done, at the pace of one. So
a step takes longer by a rate times what the longest has beyond the mean. Padding rows have one token each:
a batch on a larger graph is such a step too, beyond the mean over *all* rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from harness.planner.surface import StepSurface

#: `place` of a row of `ragged.csv` in which all requests are alike, on a graph that is larger than the batch.
PADDED = "padded"


@dataclass(frozen=True)
class ExcessRates:
    """Rates in ms a token, by size; between two measured sizes linear, beyond them the nearest one's."""

    #: Of the longest request's tokens beyond the mean of the requests.
    longest: Mapping[int, float]
    #: Of the requests' mean beyond the mean over all rows, padding included.
    padding: Mapping[int, float]

    @classmethod
    def from_rows(
        cls, rows: Iterable[Mapping[str, Any]], mode: str, surface: StepSurface, column: str
    ) -> ExcessRates:
        """Read the rows of `ragged.csv` that ran in `mode`: what `column` has beyond `surface`."""
        beyond: dict[bool, dict[int, list[tuple[float, float]]]] = {True: {}, False: {}}
        for row in rows:
            size, is_padded = int(row["padded_batch_size"]), row["place"] == PADDED
            if row["mode"] != mode or row[column] is None or not surface.covers(size):
                continue
            num_rows = size if is_padded else int(row["batch_size"])
            excess = float(row["longest_len"]) - float(row["num_kv_tokens"]) / num_rows
            tokens = np.array([row["num_kv_tokens"]], dtype=np.float64)
            extra_ms = float(row[column]) - float(surface.step_ms(size, tokens)[0])
            beyond[is_padded].setdefault(size, []).append((excess, extra_ms))
        longest = {size: _rate(points) for size, points in sorted(beyond[False].items())}
        padding = {size: _rate(points) for size, points in sorted(beyond[True].items())}
        return cls(longest, padding or longest)

    def longest_ms(self, size: int) -> float:
        return _between(self.longest, size)

    def padding_ms(self, size: int) -> float:
        return _between(self.padding, size)


def _rate(points: list[tuple[float, float]]) -> float:
    """The slope through nothing, by least squares; a step is never faster for being uneven."""
    excess, extra_ms = np.array(points).T
    return max(0.0, float((excess * extra_ms).sum() / (excess**2).sum()))


def _between(rates: Mapping[int, float], size: int) -> float:
    return float(np.interp(size, list(rates), list(rates.values()))) if rates else 0.0
