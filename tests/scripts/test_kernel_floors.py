"""The table of a step's kernels and their floors, on a made-up step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.step_profile import Kernel

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import kernel_floors

LAYER = (("qkv_gemm", 5), ("attention_kernel", 20), ("gemm", 6), ("gemm", 7), ("silu_kernel", 1), ("gemm", 8))


def replay(num_layers: int = 28) -> list[Kernel]:
    """Each kernel starts 1 µs before the one before ends, and then takes the µs that `LAYER` says."""
    kernels, now = [Kernel("embed_kernel", 0.0, 1.0, True)], 1.0
    for name, added_us in LAYER * num_layers:
        kernels.append(Kernel(name, now - 1, now + added_us, True))
        now += added_us
    return [*kernels, Kernel("gemm", now - 1, now + 50, True)]


def test_each_kernel_of_a_layer_has_what_it_adds_and_its_floor() -> None:
    rows = list(kernel_floors._layer("qwen3_0_6b", 8, [replay(), replay()], context=512, bandwidth=4e12))
    assert [(row.part, row.added_us, row.calls) for row in rows] == [
        ("attention", 20, 28), ("output", 6, 28), ("gate_up", 7, 28), ("around", 1, 28), ("down", 8, 28), ("qkv", 5, 28),
    ]  # fmt: skip
    # 8 requests of 512 tokens, keys and values of 8 heads of 128 in 2 bytes; a weight of 1024 x 2048.
    assert rows[0].floor_us == pytest.approx(2 * 8 * 512 * 8 * 128 * 2 / 4e6)
    assert rows[1].floor_us == pytest.approx(1024 * 2048 * 2 / 4e6)
    assert rows[3].floor_us is None
    table = list(kernel_floors.table([{"model": "qwen3_0_6b", "batch_size": 8, "span_us": 1367.0}], rows))
    assert "| attention | 20.0 of 4.2 |" in table
    assert table[-1] == "| whole step, ms | 1.37 |"
