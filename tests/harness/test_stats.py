from __future__ import annotations

import numpy as np
import pytest

from harness.latencies import Latencies, LatencySummary
from harness.stats import percentile, rel_iqr, rel_std

#: The scalar keys of `vllm bench serve --save-result`, less those of the client and of speech models.
VLLM_KEYS = {
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
} | {f"{s}_{m}_ms" for s in ("mean", "median", "std", "p99") for m in ("ttft", "tpot", "itl", "e2el")}


def test_percentiles_are_linear_between_samples() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([7.0], 99) == 7.0


def test_what_has_no_samples_is_none() -> None:
    assert percentile([], 50) is None
    assert rel_std([]) is rel_std([1.0]) is rel_iqr([1.0]) is None
    assert rel_std([0.0, 0.0]) is rel_iqr([0.0, 0.0]) is None


def test_noise_is_relative_to_its_level() -> None:
    assert rel_std([1.0, 3.0]) == pytest.approx(0.5)
    assert rel_std([10.0, 30.0]) == pytest.approx(0.5)
    assert rel_iqr([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)


def answered(*requests: tuple[float, list[float]]) -> LatencySummary:
    """Requests of 10 prompt tokens, given by the time of sending and the times of their tokens, in ms."""
    latencies = Latencies()
    for request_id, (sent_ms, token_ms) in enumerate(requests):
        latencies.add_sending(sent_ms)
        for index, now_ms in enumerate(token_ms):
            latencies.add_tokens(now_ms, 1, np.diff(token_ms[max(index - 1, 0) : index + 1]))
        ttft_ms, num_gaps = token_ms[0] - sent_ms, len(token_ms) - 1
        latencies.add_request(
            {
                "request_id": request_id,
                "arrival_s": sent_ms / 1e3,
                "sent_s": sent_ms / 1e3,
                "prompt_len": 10,
                "output_len": len(token_ms),
                "ttft_ms": ttft_ms,
                "tpot_ms": (token_ms[-1] - token_ms[0]) / num_gaps if num_gaps else None,
                "e2el_ms": token_ms[-1] - sent_ms,
                "num_preemptions": 0,
                "status": "ok",
            },
            sent_ms,
            token_ms[-1],
        )
    return latencies.summary()


def test_the_summary_has_the_keys_of_vllm_bench_serve() -> None:
    assert set(answered((0.0, [5.0, 7.0])).bench_serve()) == VLLM_KEYS


def test_latencies_follow_the_definitions_of_vllm() -> None:
    result = answered((0.0, [100.0, 110.0, 140.0]), (50.0, [90.0])).bench_serve()
    assert result["completed"] == 2
    assert result["total_input_tokens"] == 20
    assert result["total_output_tokens"] == 4
    assert result["mean_ttft_ms"] == 70.0
    assert result["mean_e2el_ms"] == 90.0
    assert result["mean_tpot_ms"] == 20.0, "one-token outputs have no TPOT"
    assert result["mean_itl_ms"] == 20.0
    assert result["p99_itl_ms"] == pytest.approx(29.8)
    assert result["duration"] == pytest.approx(0.14)
    assert result["request_throughput"] == pytest.approx(2 / 0.14)
    assert result["total_token_throughput"] == pytest.approx(24 / 0.14)


def test_itl_pools_the_gaps_where_tpot_averages_requests() -> None:
    result = answered((0.0, [0.0, 10.0]), (0.0, [0.0, 40.0, 80.0, 120.0])).bench_serve()
    assert result["mean_tpot_ms"] == 25.0
    assert result["mean_itl_ms"] == pytest.approx(32.5)


def test_what_was_not_measured_is_null_and_never_zero() -> None:
    result = answered((0.0, [5.0])).bench_serve()
    assert result["mean_tpot_ms"] is result["p99_itl_ms"] is result["request_goodput"] is None
    empty = Latencies().summary().bench_serve()
    assert empty["completed"] == 0
    assert empty["request_throughput"] is empty["max_concurrent_requests"] is empty["mean_ttft_ms"] is None


def test_goodput_counts_requests_that_meet_every_limit() -> None:
    summary = answered((0.0, [100.0, 120.0]), (0.0, [300.0, 310.0]), (0.0, [50.0]), (0.0, [60.0, 500.0]))
    goodput = summary.bench_serve({"ttft": 200.0, "tpot": 30.0})["request_goodput"]
    assert goodput == pytest.approx(2 / 0.5), "a one-token output meets any limit on TPOT"


def test_an_unknown_goodput_metric_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'itl'.*ttft, tpot, e2el"):
        answered((0.0, [5.0])).bench_serve({"itl": 3.0})


def test_peaks_are_counted_by_the_second_from_the_first_sending() -> None:
    second = 1000.0
    result = answered(
        (10 * second, [10.2 * second, 10.4 * second, 11.5 * second]),
        (10.5 * second, [10.6 * second]),
        (11.2 * second, [13 * second]),
    ).bench_serve()
    assert result["max_output_tokens_per_s"] == 3.0
    # Never more than two at one instant, and three never share a second either.
    assert result["max_concurrent_requests"] == 2


def test_ramp_and_drain_are_marked() -> None:
    summary = answered((0.0, [5.0, 30.0]), (2.0, [6.0, 20.0]), (25.0, [40.0]))
    assert (summary.ramp_end_ms, summary.drain_start_ms) == (20.0, 25.0)


def test_a_million_gaps_take_eight_bytes_each() -> None:
    latencies = Latencies()
    for step in range(1000):
        latencies.add_tokens(float(step), 1000, np.ones(1000))
    assert latencies.summary().itl_ms.nbytes == 8_000_000
    assert np.all(latencies.summary().itl_ms == 1.0)
