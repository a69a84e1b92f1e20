"""Made traffic: a steady batch, arrival processes by rate and burstiness, and a ramp."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from harness.workload.base import Workload
from harness.workload.length_samples import sample_lengths
from harness.workload.shaping import Shaping, shape

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.lengths import LengthSpec


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
    arrival: str,
    request_rate: float,
    num_requests: int,
    prompt_len: int | LengthSpec,
    output_len: int | LengthSpec,
    shaping: Shaping,
    burstiness: float = 1.0,
    seed: int = 0,
) -> Workload:
    """Make `num_requests` requests at `request_rate` a second (inf: all at once).

    As in `vllm bench serve`, `burstiness` is the shape of the gamma distribution of the gaps: 1 is
    Poisson, less is burstier (the gaps' CV is 1/sqrt(burstiness)), and the drawn gaps are scaled so that
    their mean rate is exactly the one asked for. Only `arrival="gamma"` looks at it. Arrivals and lengths
    draw from separate streams of `seed`: another length distribution leaves the arrivals as they are.
    ValueError for an unknown process.
    """
    if math.isinf(request_rate):
        arrival_s = np.zeros(num_requests)
    else:
        gaps = _gaps(arrival, num_requests - 1, burstiness, _streams(seed)[0])
        arrival_s = np.concatenate([[0.0], np.cumsum(gaps)]) / request_rate
    prompts, outputs = _lengths(num_requests, prompt_len, output_len, seed)
    return shape(arrival_s, prompts, outputs, shaping)


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


def _gaps(arrival: str, num_gaps: int, burstiness: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw gaps whose mean is exactly 1."""
    shapes = {"constant": None, "poisson": 1.0, "gamma": burstiness}
    if arrival not in shapes:
        raise ValueError(f"unknown arrival process {arrival!r}: choose of {', '.join(shapes)}")
    shape_parameter = shapes[arrival]
    if shape_parameter is None or not num_gaps:
        return np.ones(num_gaps)
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
