from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from harness.errors import ConfigError
from harness.workload import trace_stream
from harness.workload.base import Workload
from harness.workload.shaping import Shaping
from harness.workload.trace_stream import stream_trace
from harness.workload.traces import load_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_stream, "_BLOCK_BYTES", 4096)


def azure(tmp_path: Path, num_rows: int = 500) -> Path:
    rows = [f"2023-11-16 18:{i // 60 % 60:02}:{i % 60:02}.1234567,{i % 90},{i % 7}" for i in range(num_rows)]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join([AZURE, *rows]))
    return path


def joined(parts: list[Workload]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        np.concatenate([part.arrival_s for part in parts]),
        np.concatenate([part.prompt_len for part in parts]),
        np.concatenate([part.output_len for part in parts]),
    )


@pytest.mark.parametrize(
    "shaping",
    [
        Shaping(),
        Shaping(max_seq_len=50, over_length="clip"),
        Shaping(max_seq_len=50, over_length="skip", max_requests=123),
        Shaping(duration_s=77.0, rate_scale=2.0, max_concurrency=4),
    ],
)
def test_the_parts_are_the_trace_as_it_is_loaded_whole(tmp_path: Path, shaping: Shaping) -> None:
    path = azure(tmp_path)
    whole = load_trace(path, "azure", shaping)
    parts = list(stream_trace(path, "azure", shaping))
    assert len(parts) > 1
    arrival_s, prompt_len, output_len = joined(parts)
    assert arrival_s == pytest.approx(whole.arrival_s, abs=1e-5)
    assert prompt_len.tolist() == whole.prompt_len.tolist()
    assert output_len.tolist() == whole.output_len.tolist()
    assert all(part.max_concurrency == shaping.max_concurrency for part in parts)
    clipped = sum(int(part.notes.get("num_clipped", 0)) for part in parts)
    assert clipped == whole.notes.get("num_clipped", 0)


def test_bucketed_stamps_are_spread_in_order_across_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    records = [
        {"timestamp": i // 40 * 3000, "input_length": 10, "output_length": 5, "hash_ids": [i]}
        for i in range(400)
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    parts = list(stream_trace(path, "mooncake", Shaping()))
    assert len(parts) > 1
    arrival_s, *_ = joined(parts)
    assert len(arrival_s) == 400
    assert (np.diff(arrival_s) >= 0).all()
    assert len(np.unique(arrival_s)) == 400


def test_stamps_out_of_order_are_refused(tmp_path: Path) -> None:
    path = azure(tmp_path)
    path.write_text(path.read_text() + "\n2023-11-16 18:00:00.0,5,5")
    with pytest.raises(ConfigError, match="not in order"):
        list(stream_trace(path, "azure", Shaping()))


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = azure(tmp_path)
    path.write_text(path.read_text() + "\n2023-11-16 18:59:00.0,many,5")
    with pytest.raises(ConfigError, match="line 502"):
        list(stream_trace(path, "azure", Shaping()))


def test_a_mean_rate_needs_the_whole_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--rate-scale"):
        list(stream_trace(azure(tmp_path), "azure", Shaping(request_rate=5.0)))
