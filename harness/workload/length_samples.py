"""Prompt and output lengths drawn from a distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.lengths import LengthSpec


def sample_lengths(spec: int | LengthSpec, num_requests: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw `[num_requests]` token counts, rounded and clipped to the spec's bounds, at least 1.

    A whole number is that length each time. `mean` and `std` are those of the lengths themselves, before
    they are rounded and clipped. ValueError names what the distribution lacks.
    """
    if isinstance(spec, int):
        return np.full(num_requests, max(spec, 1), dtype=np.int64)
    samples = _draw(spec, num_requests, rng)
    return np.clip(np.rint(samples), spec.min, spec.max).astype(np.int64)


def _draw(spec: LengthSpec, num_requests: int, rng: np.random.Generator) -> NDArray[np.float64]:
    if spec.distribution == "uniform":
        return np.floor(rng.uniform(spec.min, _given(spec, "max") + 1, num_requests))
    mean = _given(spec, "mean")
    if spec.distribution == "fixed":
        return np.full(num_requests, mean, dtype=np.float64)
    if spec.distribution == "exponential":
        return rng.exponential(mean, num_requests)
    std = _given(spec, "std")
    if spec.distribution == "normal":
        return rng.normal(mean, std, num_requests)
    if spec.distribution == "lognormal":
        variance = np.log1p((std / mean) ** 2)
        return rng.lognormal(np.log(mean) - variance / 2, np.sqrt(variance), num_requests)
    raise ValueError(f"unknown length distribution {spec.distribution!r}")


def _given(spec: LengthSpec, name: str) -> float:
    value: float | None = getattr(spec, name)
    if value is None:
        raise ValueError(f"a {spec.distribution} distribution of lengths needs {name}")
    return value
