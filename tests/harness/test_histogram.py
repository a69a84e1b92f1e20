"""The histogram of lengths: drawn as it was counted, read as it was written, or refused by line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.errors import ConfigError
from harness.workload.arrivals import Arrivals, from_histogram
from harness.workload.base import Workload
from harness.workload.histogram import COLUMNS, SHIPPED, LengthHistogram
from harness.workload.shaping import Shaping
from harness.workload.traces import load_trace
from tests.harness.test_traces import real_trace

HEADER = ",".join(COLUMNS) + "\n"


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "lengths.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def counted(prompt_len: list[int], output_len: list[int]) -> LengthHistogram:
    lengths = np.array([prompt_len, output_len], dtype=np.int32)
    return LengthHistogram.of(Workload(np.zeros(len(prompt_len)), lengths[0], lengths[1]))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 200_000), st.integers(1, 5_000)), min_size=1, max_size=200))
def test_every_request_is_counted_once_in_a_bin_that_holds_it(
    tmp_path: Path, requests: list[tuple[int, int]]
) -> None:
    histogram = counted(*map(list, zip(*requests, strict=True)))
    for low_p, high_p, low_o, high_o, count in histogram.bins.tolist():
        assert sum(low_p <= p <= high_p and low_o <= o <= high_o for p, o in requests) == count
    assert histogram.bins[:, 4].sum() == len(requests)
    again = LengthHistogram.load(written(tmp_path, histogram.text("a log\n\nof mine")))
    assert np.array_equal(again.bins, histogram.bins)


def test_lengths_are_drawn_by_count_and_together() -> None:
    histogram = counted([10] * 30 + [1000] * 10, [500] * 30 + [3] * 10)
    prompts, outputs = histogram.sample(4000, np.random.default_rng(0))
    assert set(zip(prompts.tolist(), outputs.tolist(), strict=True)) == {(10, 500), (1000, 3)}
    assert (prompts == 10).mean() == pytest.approx(0.75, abs=0.03)


def test_the_shipped_histogram_is_the_public_trace_counted() -> None:
    trace = load_trace(real_trace("AzureLLMInferenceTrace_conv.csv"), "azure", Shaping())
    comment = [line[2:] for line in SHIPPED.read_text().splitlines() if line.startswith("#")]
    assert SHIPPED.read_text() == LengthHistogram.of(trace).text("\n".join(comment))


def test_the_shipped_histogram_names_its_source_and_stays_small() -> None:
    text = SHIPPED.read_text()
    assert "CC-BY-4.0" in text and "AzurePublicDataset" in text and "Changed:" in text
    assert len(text) < 30_000


def test_drawn_requests_have_the_lengths_of_the_trace_and_the_arrivals_asked_for() -> None:
    arrivals = Arrivals("gamma", 5.0, burstiness=0.25)
    statistics = from_histogram(arrivals, 20_000, LengthHistogram.load(SHIPPED), Shaping()).statistics()
    assert statistics.prompt_len.mean == pytest.approx(1155, rel=0.02)
    assert statistics.output_len.mean == pytest.approx(211, rel=0.02)
    assert statistics.prompt_len.p99 == pytest.approx(4142, rel=0.05)
    assert statistics.output_len.p50 == pytest.approx(129, rel=0.05)
    assert statistics.request_rate == pytest.approx(5.0)
    assert statistics.inter_arrival_cv == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize(
    "text",
    [
        "# mine\n" + HEADER + "1,2,3,4,5\n",
        "\ufeff" + HEADER + "1,2,3,4,5",
        HEADER.replace("\n", "\r\n") + "1,2,3,4,5\r\n\r\n",
        "note," + HEADER + "# x\nx,1,2,3,4,5\n",
    ],
    ids=["comment", "BOM, no newline at the end", "CRLF", "more columns"],
)
def test_the_same_bins_however_the_file_is_written(tmp_path: Path, text: str) -> None:
    assert LengthHistogram.load(written(tmp_path, text)).bins.tolist() == [[1, 2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        (HEADER, "has no bin with a count"),
        (HEADER + "1,2,3,4,0\n", "has no bin with a count"),
        ("prompt,output\n1,2\n", "line 1: lacks min_prompt_len.*write workload=trace"),
        (HEADER + "1,2,3,4\n", "line 2: 4 fields where the header has 5"),
        (HEADER + "1,2,3,4,5\n\n1,2,3,4,many\n", "line 4: count is 'many', not a whole number"),
        (HEADER + "0,2,3,4,5\n", "line 2: min_prompt_len is 0"),
        (HEADER + "1,2,3,4,-5\n", "line 2: count is -5"),
        (HEADER + "3,2,3,4,5\n", "line 2: min_prompt_len=3 is more than max_prompt_len=2"),
        (HEADER + "1,2,3,99999999999,5\n", "line 2: max_output_len is 99999999999"),
    ],
)
def test_a_file_that_is_no_histogram_is_refused_with_its_line(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        LengthHistogram.load(written(tmp_path, text))
    assert refused.value.field == "workload.path"
