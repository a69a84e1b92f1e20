from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import ConfigError
from harness.lengths import LengthSpec
from harness.schema import Config, WorkloadConfig
from harness.workload.arrivals import Arrivals, ramp, steady, synthetic
from harness.workload.base import Workload
from harness.workload.length_samples import sample_lengths
from harness.workload.shaping import Shaping, shape
from harness.workload.source import load_workload

LOGNORMAL = LengthSpec("lognormal", mean=200.0, std=100.0)


def made(
    arrival: str = "poisson", rate: float = 20.0, num_requests: int = 5000, **kwargs: object
) -> Workload:
    burstiness = kwargs.pop("burstiness", 1.0)
    arrivals = Arrivals(arrival, rate, burstiness)  # type: ignore[arg-type]
    return synthetic(arrivals, num_requests, 64, 32, Shaping(), **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arrival", "burstiness", "cv"),
    [("constant", 1.0, 0.0), ("poisson", 1.0, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4.0, 0.5)],
)
def test_burstiness_is_the_gamma_shape_of_vllm(arrival: str, burstiness: float, cv: float) -> None:
    statistics = made(arrival, burstiness=burstiness).statistics()
    assert statistics.inter_arrival_cv == pytest.approx(cv, abs=0.1)
    assert statistics.request_rate == pytest.approx(20.0), "drawn gaps are scaled to the exact rate"


def test_an_infinite_rate_sends_all_at_once() -> None:
    workload = made(rate=float("inf"))
    assert not workload.arrival_s.any()
    assert workload.statistics().request_rate is None
    assert "all at once" in workload.statistics().lines()[0]


def test_the_same_seed_gives_the_same_requests_and_another_does_not() -> None:
    assert np.array_equal(made(seed=3).arrival_s, made(seed=3).arrival_s)
    assert not np.array_equal(made(seed=3).arrival_s, made(seed=4).arrival_s)


def test_another_length_distribution_leaves_the_arrivals_as_they_are() -> None:
    long = synthetic(Arrivals("poisson", 20.0), 100, LOGNORMAL, 32, Shaping(), seed=1)
    short = synthetic(Arrivals("poisson", 20.0), 100, 8, LOGNORMAL, Shaping(), seed=1)
    assert np.array_equal(long.arrival_s, short.arrival_s)


@pytest.mark.parametrize(
    ("spec", "mean", "std"),
    [
        (LengthSpec("fixed", mean=200.0), 200, 0),
        (LengthSpec("uniform", min=100, max=300), 200, 58),
        (LengthSpec("normal", mean=200.0, std=20.0), 200, 20),
        (LOGNORMAL, 200, 100),
        (LengthSpec("exponential", mean=200.0), 200, 200),
    ],
    ids=lambda spec: getattr(spec, "distribution", ""),
)
def test_lengths_have_the_mean_and_deviation_asked_for(spec: LengthSpec, mean: float, std: float) -> None:
    lengths = sample_lengths(spec, 50_000, np.random.default_rng(0))
    assert lengths.mean() == pytest.approx(mean, rel=0.02)
    assert lengths.std() == pytest.approx(std, rel=0.03)


def test_lengths_stay_within_their_bounds_and_reach_both() -> None:
    lengths = sample_lengths(LengthSpec("uniform", min=3, max=5), 1000, np.random.default_rng(0))
    assert set(lengths.tolist()) == {3, 4, 5}
    clipped = sample_lengths(LengthSpec("normal", 200.0, 100.0, 150, 250), 1000, np.random.default_rng(0))
    assert (clipped.min(), clipped.max()) == (150, 250)


def test_a_distribution_that_lacks_a_number_says_which() -> None:
    with pytest.raises(ValueError, match="lognormal.*needs std"):
        sample_lengths(LengthSpec("lognormal", mean=5.0), 1, np.random.default_rng(0))


def test_steady_keeps_its_batch_in_the_system() -> None:
    workload = steady(8, 20, 64, 32, Shaping(max_concurrency=2))
    assert not workload.arrival_s.any()
    assert workload.max_concurrency == 8
    assert len(workload) == 20


def test_a_ramp_ends_at_its_rate() -> None:
    workload = ramp(2.0, 20.0, 4000, 64, 32, Shaping())
    gaps = np.diff(workload.arrival_s)
    assert 1 / gaps[:400].mean() == pytest.approx(2.9, rel=0.2)
    assert 1 / gaps[-400:].mean() == pytest.approx(19.1, rel=0.2)


def shaped(requests: list[tuple[float, int, int]], **kwargs: object) -> Workload:
    columns = np.array(requests, dtype=np.float64).T
    return shape(columns[0], columns[1].astype(np.int64), columns[2].astype(np.int64), Shaping(**kwargs))


def lengths_of(workload: Workload) -> list[tuple[int, int]]:
    return list(zip(workload.prompt_len.tolist(), workload.output_len.tolist(), strict=True))


FOUR = [(5.0, 60, 10), (6.0, 90, 40), (7.0, 10, 500), (9.0, 10, 10)]


def test_clipping_leaves_both_parts_of_a_request_something() -> None:
    workload = shaped([*FOUR, (10.0, 5000, 30)], max_seq_len=100)
    assert lengths_of(workload) == [(60, 10), (60, 40), (10, 90), (10, 10), (70, 30)]
    assert workload.notes["num_clipped"] == 3


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 50), st.integers(1, 200), st.integers(1, 200))
def test_a_clipped_request_fits_exactly_and_any_other_is_left_alone(
    max_seq_len: int, prompt_len: int, output_len: int
) -> None:
    ((new_prompt, new_output),) = lengths_of(shaped([(0.0, prompt_len, output_len)], max_seq_len=max_seq_len))
    if prompt_len + output_len <= max_seq_len:
        assert (new_prompt, new_output) == (prompt_len, output_len)
    else:
        assert new_prompt + new_output == max_seq_len
        assert 1 <= new_prompt <= prompt_len and 1 <= new_output <= output_len


def test_skipped_requests_are_counted_and_do_not_use_up_the_maximum() -> None:
    workload = shaped(FOUR, max_seq_len=100, over_length="skip", max_requests=2)
    assert lengths_of(workload) == [(60, 10), (10, 10)]
    assert workload.notes["num_skipped"] == 2
    assert workload.arrival_s.tolist() == [0.0, 4.0]


def test_over_length_requests_are_an_error_when_asked_for_and_only_within_the_cut() -> None:
    with pytest.raises(
        ConfigError, match="2 of 4 requests are longer than model.max_seq_len=100.*510 tokens"
    ):
        shaped(FOUR, max_seq_len=100, over_length="error")
    assert len(shaped(FOUR, max_seq_len=100, over_length="error", max_requests=1)) == 1


def test_a_workload_that_is_skipped_whole_is_refused() -> None:
    with pytest.raises(ConfigError, match="every request is longer"):
        shaped(FOUR, max_seq_len=5, over_length="skip")


def test_duration_and_rate_scale_count_on_the_virtual_clock() -> None:
    assert shaped(FOUR, duration_s=2.0).arrival_s.tolist() == [0.0, 1.0]
    assert shaped(FOUR, duration_s=2.0, rate_scale=2.0).arrival_s.tolist() == [0.0, 0.5, 1.0]


def test_request_rate_sets_the_mean_rate_of_what_is_kept() -> None:
    workload = shaped(FOUR, request_rate=10.0, max_requests=3)
    assert workload.statistics().request_rate == pytest.approx(10.0)
    assert not shaped(FOUR, request_rate=float("inf")).arrival_s.any()


def test_two_ways_to_set_the_rate_are_refused() -> None:
    with pytest.raises(ConfigError, match="rate_scale=1 or request_rate=null"):
        shaped(FOUR, request_rate=10.0, rate_scale=2.0)


def test_the_statistics_say_what_a_reader_needs_before_the_run() -> None:
    lines = made(num_requests=100).statistics([6.2]).lines()
    assert lines[0] == "requests: 100 over 4.9 s, 20.00 requests/s, inter-arrival CV " + lines[0][-4:]
    assert lines[1] == "prompt tokens: mean 64, p50 64, p90 64, p99 64, max 64"
    assert lines[-1] == "expected batch size: 6.2"
    assert made(num_requests=100).statistics().expectation() == []


def test_a_burst_arrives_together_among_the_others() -> None:
    arrivals = Arrivals("constant", 10.0, burst_size=5, burst_at_s=0.45)
    workload = synthetic(arrivals, 15, 64, 32, Shaping())
    expected = [0.0, 0.1, 0.2, 0.3, 0.4, *[0.45] * 5, 0.5, 0.6, 0.7, 0.8, 0.9]
    assert workload.arrival_s.tolist() == pytest.approx(expected)
    assert not Arrivals("constant", 10.0, burst_size=3).draw(3, seed=0).any()


def test_a_configuration_becomes_requests() -> None:
    config = Config()
    config.workload = WorkloadConfig(max_requests=10, prompt_len=600)
    workload = load_workload(config)
    assert len(workload) == 10
    assert workload.notes["num_clipped"] == 10
    config.workload = WorkloadConfig(kind="steady", batch_size=8, max_requests=10)
    assert load_workload(config).max_concurrency == 8
    config.workload = WorkloadConfig(kind="ramp", max_requests=10, start_rate=1.0, request_rate=50.0)
    assert len(load_workload(config)) == 10


def test_a_made_workload_lasts_as_long_as_it_is_told_to() -> None:
    config = Config()
    config.workload = WorkloadConfig(duration_s=20.0, request_rate=10.0)
    statistics = load_workload(config).statistics()
    assert statistics.duration_s == pytest.approx(20.0, abs=1.0)
    assert statistics.num_requests == pytest.approx(200, rel=0.1)


def test_an_unknown_arrival_process_is_refused() -> None:
    with pytest.raises(ValueError, match="constant, poisson, gamma"):
        made("uniform")
