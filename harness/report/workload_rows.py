"""The steps and requests of a workload as arrays, and the statistics that charts need of a million of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from harness.record_reader import read_table

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from harness.floor import Floor

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

#: Modes in the order in which they are stacked; of a prefill step the phase counts.
MODES = ("graph", "split", "compiled", "eager", "prefill")


@dataclass(frozen=True)
class Steps:
    """A value a step, in the order of the steps. `mode` indexes MODES."""

    clock_ms: Floats
    step_ms: Floats
    batch_size: Ints
    padded_batch_size: Ints
    mode: Ints
    num_kv_tokens: Ints

    def __len__(self) -> int:
        return len(self.mode)

    @property
    def is_decode(self) -> NDArray[np.bool_]:
        flags: NDArray[np.bool_] = self.mode != MODES.index("prefill")
        return flags

    def decode(self) -> Steps:
        """Return the decode steps alone."""
        kept = self.is_decode
        return Steps(*(getattr(self, name)[kept] for name in self.__dataclass_fields__))

    def floor_share(self, floor: Floor) -> float | None:
        """Return the floor of the decode steps over the time that they took; None without a time."""
        decode = self.decode()
        step_ms = float(np.nansum(decode.step_ms))
        return float(floor.step_ms(decode.num_kv_tokens).sum()) / step_ms if step_ms else None


@dataclass(frozen=True)
class Requests:
    """A value an answered request; `tpot_ms` is NaN for one output token."""

    first_token_ms: Floats
    ttft_ms: Floats
    tpot_ms: Floats
    output_len: Ints
    num_preemptions: Ints

    def __len__(self) -> int:
        return len(self.ttft_ms)


def read_steps(job_dir: Path) -> Steps:
    """Read the steps of a job; none if it replayed no workload."""
    table = read_table(job_dir, "steps")
    phase = _codes(table["phase"], ("decode", "prefill"), other="decode")
    mode = np.where(phase == 1, MODES.index("prefill"), _codes(table["mode"], MODES, other="eager"))
    batch_size = _ints(table["batch_size"])
    padded = _ints(table["padded_batch_size"])
    return Steps(
        _floats(table["clock_ms"]),
        _floats(table["step_ms"]),
        batch_size,
        np.where(padded > 0, padded, batch_size),
        mode,
        _ints(table["num_kv_tokens"]),
    )


def read_requests(job_dir: Path) -> Requests:
    """Read the requests of a job."""
    table = read_table(job_dir, "requests")
    ttft_ms = _floats(table["ttft_ms"])
    return Requests(
        _floats(table["sent_s"]) * 1e3 + ttft_ms,
        ttft_ms,
        _floats(table["tpot_ms"]),
        _ints(table["output_len"]),
        _ints(table["num_preemptions"]),
    )


def inter_token_gaps(steps: Steps, requests: Requests) -> tuple[Floats, Ints]:
    """Return the gaps between output tokens in ms, and how often each occurred.

    The record keeps no gap a token: a decode step gives every running request one, counted from the
    decode step before, or from the request's first token if that came later. A request that was
    preempted waited longer than this shows.
    """
    decode = steps.decode()
    if not len(decode):
        return np.array([]), np.array([], dtype=np.int64)
    first = np.sort(requests.first_token_ms[requests.output_len > 1])
    step_of_first = np.searchsorted(decode.clock_ms, first, side="right")
    in_range = step_of_first < len(decode)
    gaps_of_first = decode.clock_ms[step_of_first[in_range]] - first[in_range]
    num_new = np.bincount(step_of_first[in_range], minlength=len(decode))
    gaps = np.diff(decode.clock_ms, prepend=decode.clock_ms[0])
    weights = np.maximum(decode.batch_size - num_new, 0)
    weights[0] = 0
    return np.concatenate([gaps, gaps_of_first]), np.concatenate(
        [weights, np.ones(len(gaps_of_first), np.int64)]
    )


def weighted_quantiles(values: Floats, weights: Ints, shares: Floats) -> Floats:
    """Return for each share the smallest value that this share of the weight is at or below."""
    order = values.argsort(kind="stable")
    cumulative = np.cumsum(weights[order])
    index = np.searchsorted(cumulative, shares * cumulative[-1], side="left")
    result: Floats = values[order][np.minimum(index, len(values) - 1)]
    return result


def binned_quantiles(values: Ints, bin_of: Ints, num_bins: int, shares: tuple[float, ...]) -> Floats:
    """Return quantiles of the values in each bin, `[len(shares), num_bins]`; NaN where a bin is empty."""
    order = np.lexsort((values, bin_of))
    counts = np.bincount(bin_of, minlength=num_bins)
    starts = np.cumsum(counts) - counts
    ranked = values[order].astype(np.float64)
    index = starts + (np.array(shares)[:, None] * np.maximum(counts - 1, 0)).round().astype(np.int64)
    found = ranked[np.minimum(index, len(ranked) - 1)]
    result: Floats = np.where(counts > 0, found, np.nan)
    return result


def _codes(column: pa.ChunkedArray, names: tuple[str, ...], other: str) -> Ints:
    """Return for each string its index in `names`; that of `other` for an unknown or missing one."""
    encoded = column.combine_chunks().dictionary_encode()
    codes = [
        names.index(value) if value in names else names.index(other)
        for value in encoded.dictionary.to_pylist()
    ]
    lookup = np.array([*codes, names.index(other)], dtype=np.int64)
    indices = encoded.indices.fill_null(len(codes)).to_numpy(zero_copy_only=False)
    chosen: Ints = lookup[indices]
    return chosen


def _ints(column: pa.ChunkedArray) -> Ints:
    values: Ints = column.fill_null(0).to_numpy().astype(np.int64)
    return values


def _floats(column: pa.ChunkedArray) -> Floats:
    values: Floats = column.to_numpy().astype(np.float64)
    return values
