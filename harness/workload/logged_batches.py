"""Decode batches that an engine logged: counts by batch size in the order of the log, and step times."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

#: Slices of a log that are kept apart; beyond it neighbours are merged, so memory stays bounded.
_MAX_SLICES = 128
#: Step times are kept in bins 1% wide.
_LOG_GROWTH = math.log(1.01)
_NUM_EXAMPLES = 5


@dataclass
class BatchCounts:
    """Decode steps by batch size; the KV tokens where the log has them."""

    num_steps: Counter[int] = field(default_factory=Counter)
    num_kv_tokens: Counter[int] = field(default_factory=Counter)
    #: Steps of which the KV tokens are known.
    num_with_kv: Counter[int] = field(default_factory=Counter)

    def add(self, batch_size: int, count: int, num_kv_tokens: int | None = None) -> None:
        self.num_steps[batch_size] += count
        if num_kv_tokens is not None:
            self.num_kv_tokens[batch_size] += num_kv_tokens * count
            self.num_with_kv[batch_size] += count

    def update(self, other: BatchCounts) -> None:
        self.num_steps.update(other.num_steps)
        self.num_kv_tokens.update(other.num_kv_tokens)
        self.num_with_kv.update(other.num_with_kv)

    def context(self, batch_size: int) -> float | None:
        """Mean KV tokens a request in steps of a size; None if the log did not say."""
        steps = self.num_with_kv[batch_size]
        return self.num_kv_tokens[batch_size] / steps / batch_size if steps else None


class StepTimeBins:
    """Times of decode steps by batch size, as histograms: their medians, in bounded memory."""

    def __init__(self) -> None:
        self._bins: dict[tuple[int, str], Counter[int]] = {}

    def add(self, batch_size: int, step_ms: float, mode: str = "graph", count: int = 1) -> None:
        if step_ms > 0:
            bins = self._bins.setdefault((batch_size, mode), Counter())
            bins[round(math.log(step_ms) / _LOG_GROWTH)] += count

    def medians(self, mode: str) -> dict[int, tuple[float, int]]:
        """Batch size → median ms and number of samples."""
        return {
            size: (_median(bins), bins.total())
            for (size, of_mode), bins in sorted(self._bins.items())
            if of_mode == mode
        }


@dataclass
class LoggedBatches:
    """What a log gave, and what it did not."""

    #: In the order of the log.
    slices: list[BatchCounts] = field(default_factory=list)
    times: StepTimeBins = field(default_factory=StepTimeBins)
    #: The capture list that the engine logged; empty if it did not.
    capture_sizes: tuple[int, ...] = ()
    num_bytes: int = 0
    #: Lines (or objects) that were used; that had the mark of one but could not be read; and of other steps.
    num_used: int = 0
    num_malformed: int = 0
    num_other_steps: int = 0
    malformed_examples: list[str] = field(default_factory=list)
    #: What a reader should know of the source.
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._steps_a_slice = 64
        self._steps_in_slice = 0

    @property
    def num_steps(self) -> int:
        return sum(part.num_steps.total() for part in self.slices)

    def add(self, batch_size: int, count: int = 1, num_kv_tokens: int | None = None) -> None:
        """Count `count` decode steps of a size, after those before."""
        if not self.slices or self._steps_in_slice >= self._steps_a_slice:
            self._open_slice()
        self._steps_in_slice += count
        self.slices[-1].add(batch_size, count, num_kv_tokens)

    def add_slice(self, counts: BatchCounts) -> None:
        """Append counts that belong together, such as those of one logging interval."""
        self._open_slice()
        self.slices[-1].update(counts)

    def malformed(self, text: bytes | str, count: int = 1) -> None:
        self.num_malformed += count
        if len(self.malformed_examples) < _NUM_EXAMPLES:
            shown = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
            self.malformed_examples.append(shown.strip()[:200])

    def windows(self, num_windows: int) -> list[BatchCounts]:
        """Merge the slices into at most `num_windows` parts of about the same number of steps."""
        total, parts, done = self.num_steps, [BatchCounts() for _ in range(num_windows)], 0
        for counts in self.slices:
            parts[min(num_windows - 1, done * num_windows // max(total, 1))].update(counts)
            done += counts.num_steps.total()
        return parts

    def _open_slice(self) -> None:
        if len(self.slices) >= _MAX_SLICES:
            pairs = zip(self.slices[::2], self.slices[1::2], strict=False)
            merged = []
            for first, second in pairs:
                first.update(second)
                merged.append(first)
            self.slices = merged
            self._steps_a_slice *= 2
        self.slices.append(BatchCounts())
        self._steps_in_slice = 0


def _median(bins: Counter[int]) -> float:
    half, seen = (bins.total() + 1) / 2, 0
    for index in sorted(bins):
        seen += bins[index]
        if seen >= half:
            return math.exp(index * _LOG_GROWTH)
    raise AssertionError("a histogram without samples is not made")
