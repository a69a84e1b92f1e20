"""Jobs on a card with little room: the pool is cut to fit, or refused before anything is captured."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.experiment import run_job
from harness.memory import MIB
from harness.progress import Progress
from harness.record import Status
from harness.record_reader import read_result
from tests.harness.tiny import tiny_yaml

#: 4 requests of 8,192 tokens of 32 KiB take 1 GiB.
SIZES = {
    **{"num_key_value_heads": 4, "num_attention_heads": 4, "head_dim": 128, "num_hidden_layers": 16},
    "max_position_embeddings": 8192,
}
LONG = {
    "device": "cuda",
    "model.max_seq_len": 8192,
    "model.dtype": "bfloat16",
    **{f"model.config.{name}": size for name, size in SIZES.items()},
    "measure.timeout_s": 0.2,
    "parity.batch_sizes": [2, 4],
}


@contextmanager
def free_memory(mib: int) -> Iterator[None]:
    """Leave so much of the card to the block."""
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    filler = torch.empty(max(free - mib * MIB, 0), dtype=torch.uint8, device="cuda")
    try:
        yield
    finally:
        del filler
        torch.cuda.empty_cache()


def run(tmp_path: Path, overrides: dict[str, Any]) -> tuple[Status, dict[str, Any]]:
    status = run_job(tiny_yaml(LONG | overrides), tmp_path, Progress(quiet=True))
    return status, read_result(tmp_path)


def test_the_whole_pool_is_taken_where_there_is_room_and_the_estimate_holds(tmp_path: Path) -> None:
    status, result = run(tmp_path, {})
    assert status is Status.OK, result["error"]
    memory = result["memory"]
    assert memory["budget"]["num_pages"] == 4 * 512 + 1
    measured = memory["measured_graph_bytes"]
    assert measured is None or 0 < measured <= memory["budget"]["graph_bytes"]
    assert not any("KV pool holds" in warning for warning in result["warnings"])


def test_a_card_with_little_room_gets_a_smaller_pool_and_a_warning(tmp_path: Path) -> None:
    with free_memory(1500):
        status, result = run(tmp_path, {})
    assert status is Status.OK, result["error"]
    assert result["size_sweep"]["copy_bandwidth_bytes_per_s"] > 0
    budget = result["memory"]["budget"]
    assert 513 <= budget["num_pages"] < 4 * 512 + 1
    assert any("the scheduler may preempt" in warning for warning in result["warnings"])


def test_a_card_without_room_for_one_request_is_refused_before_the_capture(tmp_path: Path) -> None:
    with free_memory(500):
        status, result = run(tmp_path, {})
    assert status is Status.INVALID_CONFIG
    assert "MiB are free" in result["error"]["message"]
    assert not (tmp_path / "capture.csv").exists() or (tmp_path / "capture.csv").read_text().count("\n") <= 1


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_the_fraction_bounds_what_the_job_takes(tmp_path: Path, fraction: float) -> None:
    with free_memory(2400):
        status, result = run(tmp_path, {"attention.memory_fraction": fraction})
    assert status is Status.OK, result["error"]
    budget = result["memory"]["budget"]
    parts = ("kv", "logits", "graph", "workspace", "overhead", "measure")
    needed = sum(budget[f"{name}_bytes"] for name in parts)
    assert needed <= fraction * budget["free_bytes"] or budget["num_pages"] == 513
