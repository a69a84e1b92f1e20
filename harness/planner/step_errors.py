"""Where a prediction errs: each kind of step of a replay, priced on the very batches that ran."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from harness.planner.step_times import StepTimes

#: A request that is this much longer than the mean of its batch makes the batch an uneven one.
_UNEVEN = 2.0


@dataclass(frozen=True)
class KindError:
    """Steps of one kind: how many, and their mean time in ms as predicted and as measured."""

    name: str
    num_steps: int
    predicted_ms: float
    measured_ms: float

    @property
    def deviation(self) -> float:
        return self.predicted_ms / self.measured_ms - 1


def step_errors(run: str | Path, times: StepTimes) -> list[KindError]:
    """Price every step of `run`'s replay by what it computed, and compare by kind.

    Unlike a simulation this lets no error feed back into the batches. A record without the longest
    request of a step is priced as if all were alike.
    """
    from harness.record_reader import read_table

    rows = read_table(run, "steps").to_pylist()
    kinds: dict[str, list[tuple[float, float]]] = {}
    for kind, predicted_ms, measured_ms in _priced(rows, times):
        kinds.setdefault(kind, []).append((predicted_ms, measured_ms))
    return [
        KindError(kind, len(pairs), *(float(mean) for mean in np.mean(pairs, axis=0)))
        for kind, pairs in sorted(kinds.items())
    ]


def _priced(rows: list[dict[str, Any]], times: StepTimes) -> Iterator[tuple[str, float, float]]:
    between_ms = _prefill_gap_ms(rows)
    for before, row in pairwise(rows):
        tokens, kv_tokens, batch_size = row["num_tokens"], row["num_kv_tokens"], row["batch_size"]
        if row["phase"] == "prefill":
            # Of packed prompts only the first can have a cached part; its share of the tokens is not recorded.
            num_pairs = tokens * (kv_tokens - tokens) // batch_size
            whole = "of a whole chunk" if tokens == len(times.prefill_ns) - 1 else "of a part of a chunk"
            yield f"prefill {whole}", times.prefill_ms(tokens, num_pairs), row["step_ms"] + between_ms
            continue
        longest = row.get("longest_len")
        uneven = longest is not None and longest > _UNEVEN * kv_tokens / batch_size
        kind = f"decode after {before['phase']}{', uneven lengths' if uneven else ''}"
        predicted_ms = times.decode_ms(batch_size, kv_tokens, longest, before["phase"] == "prefill")
        yield kind, predicted_ms, row["clock_ms"] - before["clock_ms"]


def _prefill_gap_ms(rows: list[dict[str, Any]]) -> float:
    """What passes between steps before a prefill; the median, as an idle time may lie there too."""
    gaps = [
        row["clock_ms"] - before["clock_ms"] - row["step_ms"]
        for before, row in pairwise(rows)
        if row["phase"] == "prefill"
    ]
    return float(np.median(gaps)) if gaps else 0.0
