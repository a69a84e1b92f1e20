"""A workload: who asks when, for how many tokens. Three arrays, so that a million requests stay small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Request(NamedTuple):
    """One request. The lengths are what it will really use: generation does not stop early."""

    request_id: int
    #: Seconds after the start of the workload.
    arrival_s: float
    #: Tokens, at least 1.
    prompt_len: int
    #: Tokens, at least 1.
    output_len: int


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival. Request `i` has `request_id` i.

    `max_concurrency` delays the sending: a request is sent once it has arrived *and* fewer than that
    many are in the system. `notes` says what loading did to the source (requests clipped, skipped, …).
    """

    #: `[num_requests]` float64, not decreasing, in seconds from 0.
    arrival_s: NDArray[np.float64]
    #: `[num_requests]` int32, at least 1.
    prompt_len: NDArray[np.int32]
    #: `[num_requests]` int32, at least 1.
    output_len: NDArray[np.int32]
    max_concurrency: int | None = None
    #: Of the requests, how many arrive together, apart from the others.
    burst_size: int = 0
    notes: dict[str, int | float | str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.arrival_s)

    def changed_requests(self) -> list[str]:
        """Say in a line each what became of requests longer than `model.max_seq_len`."""
        lines = []
        for note, happened, instead in (
            ("num_clipped", "shortened", "skip"),
            ("num_skipped", "left out", "clip"),
        ):
            if number := self.notes.get(note):
                what, were = ("1 request", "was") if number == 1 else (f"{number} requests", "were")
                lines.append(
                    f"{what} longer than model.max_seq_len {were} {happened}: raise it, or write "
                    f"workload.over_length={instead}"
                )
        return lines

    def request(self, index: int) -> Request:
        return Request(
            index,
            float(self.arrival_s[index]),
            int(self.prompt_len[index]),
            int(self.output_len[index]),
        )

    def statistics(self, stable_batches: Sequence[float] = ()) -> WorkloadStatistics:
        """Summarise the workload; `stable_batches` comes from the function of that name."""
        rate, cv = arrival_rate(self.arrival_s)
        return WorkloadStatistics(
            num_requests=len(self),
            duration_s=float(self.arrival_s[-1] - self.arrival_s[0]),
            request_rate=rate,
            inter_arrival_cv=cv,
            prompt_len=LengthStatistics.of(self.prompt_len),
            output_len=LengthStatistics.of(self.output_len),
            max_concurrency=self.max_concurrency,
            burst_size=self.burst_size,
            expected_batch=stable_batches[0] if stable_batches else None,
            stable_batches=list(stable_batches),
            notes=self.notes,
        )


@dataclass(frozen=True)
class LengthStatistics:
    """Mean and percentiles of a length, in tokens."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: int

    @classmethod
    def of(cls, lengths: NDArray[np.int32]) -> LengthStatistics:
        p50, p90, p99 = np.percentile(lengths, [50, 90, 99])
        return cls(float(lengths.mean()), float(p50), float(p90), float(p99), int(lengths.max()))

    def __str__(self) -> str:
        return f"mean {self.mean:.0f}, p50 {self.p50:.0f}, p90 {self.p90:.0f}, p99 {self.p99:.0f}, max {self.max}"


@dataclass(frozen=True)
class WorkloadStatistics:
    """What a reader should know of a workload before it runs. Unknown numbers are None."""

    num_requests: int
    #: First arrival to last.
    duration_s: float
    #: Requests a second; None if all arrive at once.
    request_rate: float | None
    #: Coefficient of variation of the gaps: 0 constant, 1 Poisson, more is bursty.
    inter_arrival_cv: float | None
    prompt_len: LengthStatistics
    output_len: LengthStatistics
    max_concurrency: int | None
    burst_size: int
    #: Requests decoding at one time, by Little's law: the smallest of `stable_batches`.
    expected_batch: float | None
    #: Empty while no step's time is known.
    stable_batches: list[float]
    notes: dict[str, int | float | str]

    def lines(self) -> list[str]:
        """The statistics as lines of text, without indentation."""
        rate = "all at once" if self.request_rate is None else f"{self.request_rate:.2f} requests/s"
        cv = "" if self.inter_arrival_cv is None else f", inter-arrival CV {self.inter_arrival_cv:.2f}"
        lines = [
            f"requests: {self.num_requests} over {self.duration_s:.1f} s, {rate}{cv}",
            f"prompt tokens: {self.prompt_len}",
            f"output tokens: {self.output_len}",
        ]
        if self.max_concurrency is not None:
            lines.append(f"at most {self.max_concurrency} requests in the system at one time")
        if self.burst_size:
            lines.append(f"of the requests, {self.burst_size} arrive together")
        lines += [f"{name}: {value}" for name, value in self.notes.items()]
        return lines + self.expectation()

    def expectation(self) -> list[str]:
        """The expected batch as lines of text; none while no step's time is known."""
        if not self.stable_batches:
            return []
        lines = [f"expected batch size: {self.stable_batches[0]:.1f}"]
        if len(self.stable_batches) > 1:
            others = ", ".join(f"{size:.1f}" for size in self.stable_batches[1:])
            lines.append(f"also stable: {others}; once a burst has lifted the batch there, it stays")
        return lines


def arrival_rate(arrival_s: NDArray[np.float64]) -> tuple[float | None, float | None]:
    """Return requests a second and the coefficient of variation of the gaps (None where undefined)."""
    gaps = np.diff(arrival_s)
    mean = float(gaps.mean()) if len(gaps) else 0.0
    if mean <= 0:
        return None, None
    return 1 / mean, float(gaps.std()) / mean
