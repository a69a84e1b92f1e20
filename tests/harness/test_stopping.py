"""Stopping rules against simulated series: what they stop on, and what they say when they do not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from harness.stats import rel_iqr, rel_std
from harness.stopping import StoppingRule, WarmUp

Floats = NDArray[np.float64]


class Timer:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def sample_until_done(
    series: Iterable[float], min_samples: int = 20, min_time_s: float = 0.0, max_noise: float = 0.05
) -> StoppingRule:
    """Feed samples in ms to a rule whose time passes with them, and that ends after 10 s."""
    timer = Timer()
    rule = StoppingRule(min_samples, min_time_s, max_noise, timeout_s=10.0, timer_s=timer)
    for sample_ms in series:
        timer.now_s += sample_ms / 1e3
        rule.add(sample_ms)
        if rule.done:
            return rule
    raise AssertionError("the rule never ended")


def noisy(level: Callable[[int], float], noise: float = 0.01, seed: int = 0) -> Iterator[float]:
    rng = np.random.default_rng(seed)
    index = 0
    while True:
        yield level(index) * float(rng.normal(1.0, noise))
        index += 1


def test_a_quiet_series_stops_at_the_minimum_of_samples() -> None:
    rule = sample_until_done(noisy(lambda i: 4.0))
    assert rule.num_samples == 20
    assert rule.unmet_condition is None
    assert not rule.timed_out


def test_the_minimum_of_time_is_waited_for() -> None:
    rule = sample_until_done(noisy(lambda i: 4.0), min_time_s=1.0)
    assert 250 <= rule.num_samples <= 253
    assert rule.unmet_condition is None


def test_a_series_that_drifts_is_not_taken_for_quiet() -> None:
    rule = sample_until_done(noisy(lambda i: 4.0 + 0.05 * i))
    assert rule.timed_out
    assert "rel_std" in str(rule.unmet_condition)


def test_a_step_within_the_series_is_not_taken_for_quiet() -> None:
    rule = sample_until_done(noisy(lambda i: 4.0 if i < 10 else 6.0))
    assert rule.num_samples > 200
    assert "rel_iqr" not in str(rule.unmet_condition), "after the step the middle half is quiet again"


def test_an_alternating_series_fails_both_measures_of_noise() -> None:
    rule = sample_until_done(noisy(lambda i: 4.0 + 2.0 * (i % 2)))
    assert str(rule.unmet_condition).startswith("rel_std 0.2")
    assert "rel_iqr 0.4" in str(rule.unmet_condition)


def test_a_heavy_tail_is_caught_by_the_standard_deviation_alone() -> None:
    rng = np.random.default_rng(1)
    series = (4.0 * (20.0 if rng.random() < 0.02 else 1.0) for _ in range(100_000))
    rule = sample_until_done(series, min_samples=200)
    assert rule.timed_out
    assert rule.rel_iqr == 0.0
    assert str(rule.unmet_condition).startswith("rel_std")
    assert "rel_iqr" not in str(rule.unmet_condition)


def test_a_wide_middle_is_caught_by_the_iqr_alone() -> None:
    """Two levels 8% apart: 3.9% of standard deviation, 8% of IQR."""
    rule = sample_until_done(noisy(lambda i: 4.32 if i % 5 < 2 else 4.0, noise=0.0))
    assert rule.timed_out
    assert str(rule.unmet_condition).startswith("rel_iqr 0.08")
    assert "rel_std" not in str(rule.unmet_condition)


def test_what_a_slow_drift_can_hide_is_bounded_by_the_noise_allowed() -> None:
    rule = sample_until_done(noisy(lambda i: 4.0 * (1 + 0.001 * i), noise=0.0))
    assert rule.unmet_condition is None
    assert 0.001 * rule.num_samples <= 0.05 * 12**0.5


def test_the_timeout_names_every_unmet_condition() -> None:
    rule = sample_until_done([4000.0] * 3, min_samples=5, min_time_s=60.0)
    assert rule.unmet_condition == "num_samples 3 < min_samples 5; measured 12 s < min_time_s 60"


def test_the_time_can_be_up_before_the_first_sample() -> None:
    timer = Timer()
    rule = StoppingRule(2, 0.0, 0.05, timeout_s=1.0, timer_s=timer)
    assert not rule.done
    timer.now_s = 1.0
    assert rule.done and rule.timed_out
    assert "num_samples 0 < min_samples 2" in str(rule.unmet_condition)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.01, 1e4), min_size=2, max_size=60))
def test_running_noise_equals_the_noise_of_the_whole_series(samples: list[float]) -> None:
    rule = StoppingRule(2, 0.0, 0.05, timeout_s=1.0, timer_s=Timer())
    for sample_ms in samples:
        rule.add(sample_ms)
    assert rule.rel_std == pytest.approx(rel_std(samples), abs=1e-9)
    assert rule.rel_iqr == pytest.approx(rel_iqr(samples), abs=1e-9)


#: Kind → its samples in ms, and in which share of the simulations it may be called quiet.
_SIMULATED: dict[str, tuple[Callable[[np.random.Generator, int], Floats], tuple[float, float]]] = {
    "quiet": (lambda rng, n: 4 * rng.normal(1, 0.01, n), (1.0, 1.0)),
    "drift of 1% a sample": (
        lambda rng, n: 4 * (1 + 0.01 * np.arange(n)) * rng.normal(1, 0.01, n),
        (0.0, 0.0),
    ),
    "a step of a half": (
        lambda rng, n: 4 * (1 + 0.5 * (np.arange(n) >= rng.integers(1, 20))) * rng.normal(1, 0.01, n),
        (0.0, 1.0),  # once hundreds of samples of the second level outweigh those of the first
    ),
    "alternating by a fifth": (
        lambda rng, n: 4 * (1 + 0.2 * (np.arange(n) % 2)) * rng.normal(1, 0.01, n),
        (0.0, 0.0),
    ),
    "heavy tail": (lambda rng, n: 4 * (1 + 0.005 * rng.pareto(1.5, n)), (0.5, 1.0)),
    "slow waves of 3%": (
        lambda rng, n: (
            4 * (1 + 0.03 * np.sin(np.arange(n) / 15 + rng.uniform(0, 6))) * rng.normal(1, 0.01, n)
        ),
        (1.0, 1.0),
    ),
}


@pytest.mark.parametrize("kind", _SIMULATED)
def test_what_is_called_quiet_has_a_median_to_rely_on(kind: str) -> None:
    """Forty simulations of a kind: how often it is called quiet, and how far the median is then from that of the
    whole series of 600."""
    make, (least, most) = _SIMULATED[kind]
    num_quiet, errors = 0, [0.0]
    for seed in range(40):
        series = make(np.random.default_rng(seed), 600)
        rule = sample_until_done(itertools.chain(series, itertools.repeat(1e9)))
        if rule.unmet_condition is None:
            num_quiet += 1
            seen = series[: rule.num_samples]
            errors.append(abs(float(np.median(seen) / np.median(series)) - 1))
    assert least * 40 <= num_quiet <= most * 40
    assert max(errors) <= 0.05


def warm_up(series: Iterable[float], num_warmup: int = 0) -> WarmUp:
    rule = WarmUp(num_warmup)
    for sample_ms in series:
        rule.add(sample_ms)
        if rule.done:
            return rule
    raise AssertionError("the warm-up never ended")


def test_warm_up_outlasts_a_slow_start() -> None:
    rule = warm_up(noisy(lambda i: 4.0 + 40.0 * 0.8**i))
    assert rule.stable
    assert 4.0 + 40.0 * 0.8 ** (rule.num_samples - 8) < 4.0 * 1.6


def test_warm_up_takes_an_alternating_series_as_one_level() -> None:
    assert warm_up(noisy(lambda i: 4.0 + 2.0 * (i % 2), noise=0.001)).num_samples == 8


def test_warm_up_runs_the_minimum_even_when_stable() -> None:
    assert warm_up(noisy(lambda i: 4.0), num_warmup=30).num_samples == 30


def test_a_warm_up_that_never_settles_ends_and_says_so() -> None:
    rule = warm_up(1.5**i for i in range(1000))
    assert rule.unmet_condition == "warm-up not stable after 200 samples"


def test_a_warm_up_that_the_caller_ends_says_that_it_was_not_stable() -> None:
    rule = WarmUp()
    rule.add(4.0)
    assert not rule.done
    assert rule.unmet_condition == "warm-up not stable after 1 samples"
