"""Made traffic: a steady batch, arrival processes by rate and burstiness, a burst, and a ramp."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from harness.workload.base import Workload
from harness.workload.length_samples import sample_lengths
from harness.workload.shaping import Shaping, shape

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.lengths import LengthSpec
    from harness.workload.histogram import LengthHistogram


@dataclass(frozen=True)
class Arrivals:
    """When requests arrive.

    As in `vllm bench serve`, `burstiness` is the shape of the gamma distribution of the gaps: 1 is
    Poisson, less is burstier (the gaps' CV is 1/sqrt(burstiness)), and the drawn gaps are scaled so that
    their mean rate is exactly the one asked for. Only `process="gamma"` looks at it.
    """

    #: `constant`, `poisson` or `gamma`.
    process: str
    #: Requests a second; inf: all at once.
    request_rate: float
    burstiness: float = 1.0
    #: Of the requests, how many arrive together, `burst_at_s` after the start.
    burst_size: int = 0
    burst_at_s: float = 0.0

    def draw(self, num_requests: int, seed: int) -> NDArray[np.float64]:
        """Return `[num_requests]` times in seconds, sorted. ValueError for an unknown process."""
        num_spread = num_requests - self.burst_size
        if math.isinf(self.request_rate):
            spread = np.zeros(num_spread)
        else:
            gaps = _gaps(self.process, num_spread - 1, self.burstiness, _streams(seed)[0])
            spread = np.concatenate([[0.0], np.cumsum(gaps)])[:num_spread] / self.request_rate
        return np.sort(np.concatenate([spread, np.full(self.burst_size, self.burst_at_s)]))


def steady(
    batch_size: int,
    num_requests: int,
    prompt_len: int | LengthSpec,
    output_len: int | LengthSpec,
    shaping: Shaping,
    seed: int = 0,
) -> Workload:
    """Keep `batch_size` requests in the system: all arrive at once, and the next is sent when one ends."""
    arrival_s = np.zeros(num_requests)
    prompts, outputs = _lengths(num_requests, prompt_len, output_len, seed)
    limits = Shaping(shaping.max_seq_len, shaping.over_length, max_concurrency=batch_size)
    return shape(arrival_s, prompts, outputs, limits)


def synthetic(
    arrivals: Arrivals,
    num_requests: int,
    prompt_len: int | LengthSpec,
    output_len: int | LengthSpec,
    shaping: Shaping,
    seed: int = 0,
) -> Workload:
    """Make `num_requests` requests whose two lengths are drawn each for itself.

    Arrivals and lengths draw from separate streams of `seed`: another length distribution leaves the
    arrivals as they are.
    """
    prompts, outputs = _lengths(num_requests, prompt_len, output_len, seed)
    return _made(arrivals, prompts, outputs, shaping, seed)


def from_histogram(
    arrivals: Arrivals, num_requests: int, histogram: LengthHistogram, shaping: Shaping, seed: int = 0
) -> Workload:
    """Make `num_requests` requests whose lengths are drawn from `histogram`, prompt and output together."""
    prompts, outputs = histogram.sample(num_requests, _streams(seed)[1])
    return _made(arrivals, prompts, outputs, shaping, seed)


def _made(
    arrivals: Arrivals,
    prompts: NDArray[np.int64],
    outputs: NDArray[np.int64],
    shaping: Shaping,
    seed: int,
) -> Workload:
    workload = shape(arrivals.draw(len(prompts), seed), prompts, outputs, shaping)
    return replace(workload, burst_size=min(arrivals.burst_size, len(workload)))


def ramp(
    start_rate: float,
    end_rate: float,
    num_requests: int,
    prompt_len: int | LengthSpec,
    output_len: int | LengthSpec,
    shaping: Shaping,
    seed: int = 0,
) -> Workload:
    """Raise the rate linearly from request to request, as `--ramp-up-strategy linear` of vllm bench serve."""
    rates = np.linspace(start_rate, end_rate, num_requests)[:-1]
    gaps = _streams(seed)[0].exponential(1.0, num_requests - 1) / rates
    prompts, outputs = _lengths(num_requests, prompt_len, output_len, seed)
    return shape(np.concatenate([[0.0], np.cumsum(gaps)]), prompts, outputs, shaping)


def _gaps(process: str, num_gaps: int, burstiness: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw gaps whose mean is exactly 1."""
    shapes = {"constant": None, "poisson": 1.0, "gamma": burstiness}
    if process not in shapes:
        raise ValueError(f"unknown arrival process {process!r}: choose of {', '.join(shapes)}")
    shape_parameter = shapes[process]
    if shape_parameter is None or num_gaps < 1:
        return np.ones(max(num_gaps, 0))
    gaps = rng.gamma(shape_parameter, size=num_gaps)
    gaps /= gaps.mean()
    return gaps


def _lengths(
    num_requests: int, prompt_len: int | LengthSpec, output_len: int | LengthSpec, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    _, prompt_rng, output_rng = _streams(seed)
    return (
        sample_lengths(prompt_len, num_requests, prompt_rng),
        sample_lengths(output_len, num_requests, output_rng),
    )


def _streams(seed: int) -> list[np.random.Generator]:
    return [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(3)]
