"""How sure a median is, on series whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from harness.report.bootstrap import block_length, median_error, student_quantile


def noise(
    num_samples: int, share: float = 0.02, correlation: float = 0.0, seed: int = 0
) -> NDArray[np.float64]:
    """A first-order autoregressive series around 4 ms."""
    rng = np.random.default_rng(seed)
    series = rng.normal(size=num_samples)
    for index in range(1, num_samples):
        series[index] = correlation * series[index - 1] + math.sqrt(1 - correlation**2) * series[index]
    result: NDArray[np.float64] = 4.0 * np.exp(share * series)
    return result


@pytest.mark.parametrize(
    ("degrees", "probability", "table"),
    [(1, 0.99, 31.821), (3, 0.99, 4.541), (10, 0.9995, 4.587), (30, 0.975, 2.042), (2000, 0.975, 1.961)],
)
def test_quantiles_of_student_agree_with_the_tables(degrees: int, probability: float, table: float) -> None:
    assert student_quantile(probability, degrees) == pytest.approx(table, rel=1e-3)


def test_the_error_of_independent_samples_is_that_of_a_median() -> None:
    errors = [median_error(noise(200, seed=seed)).log_error for seed in range(20)]
    assert np.mean(errors) == pytest.approx(1.2533 * 0.02 / math.sqrt(200), rel=0.3)


def test_samples_that_resemble_their_neighbours_are_worth_fewer() -> None:
    alone = [median_error(noise(400, seed=seed)) for seed in range(10)]
    alike = [median_error(noise(400, correlation=0.9, seed=seed)) for seed in range(10)]
    assert np.mean([error.log_error for error in alike]) > 2 * np.mean([error.log_error for error in alone])
    assert np.mean([error.num_blocks for error in alike]) < 0.2 * np.mean(
        [error.num_blocks for error in alone]
    )


def test_independent_samples_are_drawn_nearly_one_by_one_and_a_drift_in_long_stretches() -> None:
    assert np.mean([block_length(noise(300, seed=seed)) for seed in range(20)]) < 3
    assert block_length(noise(300) * np.linspace(1.0, 1.2, 300)) > 40


def test_an_outlier_does_not_hide_a_drift() -> None:
    drift = noise(300) * np.linspace(1.0, 1.2, 300)
    drift[7] = 4000.0
    assert block_length(drift) > 40


def test_a_step_within_the_series_leaves_the_median_open_to_half_its_height() -> None:
    series = noise(100, share=0.001)
    series[50:] *= 1.06
    assert median_error(series).log_error >= math.log(1.06) / 2 * 0.99


def test_equal_samples_have_no_error_and_one_sample_has_no_end_of_it() -> None:
    assert median_error(np.full(30, 4.0)).log_error < 1e-12
    assert median_error(np.array([4.0])).log_error == math.inf


def test_a_long_series_is_thinned_without_losing_its_median() -> None:
    series = noise(20_000)
    error = median_error(series)
    assert error.median == np.median(series)
    assert 0 < error.log_error < 0.005


def test_the_same_series_gives_the_same_error() -> None:
    assert median_error(noise(64)) == median_error(noise(64))
