"""Little's law, and the two batch sizes that a ceiling makes stable."""

from __future__ import annotations

import numpy as np
import pytest

from harness.workload.base import Workload
from harness.workload.stable_batch import stable_batches


def traffic(request_rate: float, output_len: int = 33, num_requests: int = 1000) -> Workload:
    arrival_s = np.zeros(num_requests) if request_rate == np.inf else np.arange(num_requests) / request_rate
    lengths = np.full((2, num_requests), [[64], [output_len]], dtype=np.int32)
    return Workload(arrival_s, lengths[0], lengths[1])


# 20 requests/s with 32 decode steps each: 0.64 tokens a ms.
def test_the_batch_is_what_arrives_in_a_step() -> None:
    assert stable_batches(traffic(20), 64, lambda batch_size: 10.0) == pytest.approx([6.4])
    assert stable_batches(traffic(20), 64, lambda batch_size: 5.0 + batch_size) == pytest.approx([3.2 / 0.36])


def test_prefill_takes_its_share_of_the_time() -> None:
    expected = 6.4 / (1 - 20 * 25e-3)
    assert stable_batches(traffic(20), 64, lambda batch_size: 10.0, 25.0) == pytest.approx([expected])
    assert stable_batches(traffic(20), 64, lambda batch_size: 10.0, 50.0) == [64.0]


def test_a_rate_beyond_the_steps_fills_the_cap() -> None:
    assert stable_batches(traffic(20), 4, lambda batch_size: 10.0) == [4.0]
    assert stable_batches(traffic(np.inf), 64, lambda batch_size: 10.0) == [64.0]
    assert stable_batches(traffic(20, num_requests=3), 64, lambda batch_size: 10.0) == [3.0]


def graphs_to(ceiling: int, eager_ms: float):  # type: ignore[no-untyped-def]
    return lambda batch_size: 10.0 if batch_size <= ceiling else eager_ms


def test_slower_steps_above_the_ceiling_make_a_second_stable_batch() -> None:
    assert stable_batches(traffic(20), 64, graphs_to(8, 30.0)) == pytest.approx([6.4, 19.2])
    assert stable_batches(traffic(20), 16, graphs_to(8, 30.0)) == pytest.approx([6.4, 16.0])


def test_a_ceiling_that_the_load_does_not_reach_either_way_leaves_one() -> None:
    assert stable_batches(traffic(20), 64, graphs_to(24, 30.0)) == pytest.approx([6.4])
    assert stable_batches(traffic(30), 64, graphs_to(8, 30.0)) == pytest.approx([28.8])


def test_a_stair_of_padding_does_not_count_as_two() -> None:
    assert len(stable_batches(traffic(20), 64, graphs_to(7, 12.0))) == 1


def test_a_statistics_line_names_both() -> None:
    lines = traffic(20).statistics([6.4, 19.2]).expectation()
    assert lines == [
        "expected batch size: 6.4",
        "also stable: 19.2; once a burst has lifted the batch there, it stays",
    ]
