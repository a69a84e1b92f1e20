"""Host time of a decode step beside the device's, and what a prefill step takes in the loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def _nothing() -> NDArray[np.float64]:
    return np.zeros(1)


@dataclass(frozen=True)
class HostTime:
    """ms by batch size, `[num_points]` each: linear between the sizes measured, and held beyond them."""

    batch_size: NDArray[np.float64] = field(default_factory=_nothing)
    #: Of a step that follows a decode step, and of one that follows a prefill step.
    after_decode_ms: NDArray[np.float64] = field(default_factory=_nothing)
    after_prefill_ms: NDArray[np.float64] = field(default_factory=_nothing)

    @classmethod
    def linear(cls, base_ms: float, per_request_ms: float, max_batch_size: int) -> Self:
        """Return the same line after either kind of step."""
        sizes = np.array([1.0, max(2, max_batch_size)])
        host_ms = np.maximum(base_ms + per_request_ms * sizes, 0.0)
        return cls(sizes, host_ms, host_ms)

    @classmethod
    def from_loop(cls, rows: Iterable[Mapping[str, Any]]) -> Self | None:
        """Read the decode rows of `loop.csv`: means over its moments; None without rows of both kinds."""
        by_size: dict[int, dict[str, list[float]]] = {}
        for row in rows:
            if row["phase"] == "decode" and row["host_ms_mean"] is not None:
                kinds = by_size.setdefault(int(row["batch_size"]), {})
                kinds.setdefault(row["previous"], []).append(float(row["host_ms_mean"]))
        sizes = sorted(size for size, kinds in by_size.items() if {"decode", "prefill"} <= kinds.keys())
        if not sizes:
            return None
        means = [[float(np.mean(by_size[size][kind])) for size in sizes] for kind in ("decode", "prefill")]
        return cls(np.array(sizes, dtype=np.float64), np.array(means[0]), np.array(means[1]))

    def ms(self, batch_size: int, after_prefill: bool = False) -> float:
        values = self.after_prefill_ms if after_prefill else self.after_decode_ms
        return float(np.interp(batch_size, self.batch_size, values))


@dataclass(frozen=True)
class PrefillCurve:
    """Time of a prefill step, the host's included.

    `[num_points]` by its tokens, increasing; and what is added by the cached tokens that they attend to:
    `[num_pairs]` by the number of pairs of a new and a cached token, from 0. Times in ms.
    """

    num_tokens: NDArray[np.float64]
    step_ms: NDArray[np.float64]
    pairs: NDArray[np.float64] = field(default_factory=_nothing)
    pairs_ms: NDArray[np.float64] = field(default_factory=_nothing)

    @classmethod
    def from_points(cls, points: Iterable[tuple[int, int, float]]) -> Self | None:
        """Build from (tokens, cached tokens before them, ms): the medians of points alike. None without any."""
        by_chunk: dict[tuple[int, int], list[float]] = {}
        for num_tokens, cached, chunk_ms in points:
            by_chunk.setdefault((num_tokens, cached), []).append(chunk_ms)
        medians = {chunk: float(np.median(values)) for chunk, values in by_chunk.items()}
        empty = {
            num_tokens: time_ms for (num_tokens, cached), time_ms in sorted(medians.items()) if not cached
        }
        if not empty:
            return None
        tokens, step_ms = np.array(list(empty), dtype=np.float64), np.array(list(empty.values()))
        added: dict[int, list[float]] = {}
        for (num_tokens, cached), time_ms in medians.items():
            if cached and num_tokens in empty:
                added.setdefault(num_tokens * cached, []).append(time_ms - empty[num_tokens])
        pairs = np.array([0, *sorted(added)], dtype=np.float64)
        added_ms = [0.0, *(float(np.mean(added[number])) for number in sorted(added))]
        # Attending to more costs more; what falls is the host's noise.
        pairs_ms: NDArray[np.float64] = np.maximum.accumulate(np.array(added_ms))
        return cls(tokens, step_ms, pairs, pairs_ms)
