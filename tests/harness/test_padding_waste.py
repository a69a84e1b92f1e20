"""Padding waste, against counting every padding row by hand."""

from __future__ import annotations

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.workload_replay import ReplayTally
from harness.workload_shares import padding_waste
from runners.padding import create_strategy


@st.composite
def captured_and_batches(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    sizes = draw(st.lists(st.integers(1, 64), min_size=1, max_size=8, unique=True))
    batches = draw(st.lists(st.integers(1, max(sizes)), min_size=1, max_size=40))
    return sorted(sizes), batches


@given(captured_and_batches())
def test_padding_waste_is_that_counted_row_by_row(drawn: tuple[list[int], list[int]]) -> None:
    sizes, batches = drawn
    strategy, tally, rows = create_strategy("nearest", sizes), ReplayTally(), []
    for batch_size in batches:
        plan = strategy.plan(batch_size)
        assert plan is not None
        row = {
            "phase": "decode",
            "mode": plan.mode,
            "reason": plan.reason,
            "batch_size": batch_size,
            "padded_batch_size": plan.padded_batch_size(batch_size),
        }
        rows.append(row)
        tally.add(row)  # type: ignore[arg-type]
    steps = pd.DataFrame(rows)

    by_size = {size: [0, 0] for size in sizes}  # rows that hold a request, and rows that do not
    for batch_size in batches:
        size = next(size for size in sizes if size >= batch_size)
        for row_index in range(size):
            by_size[size][row_index >= batch_size] += 1
    for size, of_size in steps.groupby("padded_batch_size"):
        used, wasted = by_size[int(size)]  # type: ignore[arg-type]
        assert padding_waste(of_size) == pytest.approx(wasted / (used + wasted))
    used, wasted = (sum(counts) for counts in zip(*by_size.values(), strict=True))
    assert padding_waste(steps) == pytest.approx(wasted / (used + wasted))
    assert tally.as_dict()["padding_waste"] == pytest.approx(wasted / (used + wasted))
