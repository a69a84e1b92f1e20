from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.planner.contexts import ContextGrid
from harness.planner.cost import CostTable
from harness.planner.cost_source import load_costs
from harness.planner.honesty import WindowTimes, compare
from harness.planner.step_times import step_times
from harness.planner.traffic import ListTraffic
from tests.harness.planner.measured_run import MAX_BATCH_SIZE, write_run

GRID = ContextGrid.up_to(4096)
EVERYTHING = slice(None)


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> CostTable:
    return load_costs(write_run(tmp_path_factory.mktemp("run")))


def traffic(
    costs: CostTable, sizes: list[int], num_windows: int = 20, seed: int = 0, context: int = 500
) -> ListTraffic:
    """Windows that differ: around batches of 5 to 25, at one context."""
    rng = np.random.default_rng(seed)
    histogram = np.zeros((num_windows, MAX_BATCH_SIZE + 1, GRID.num_cells), dtype=np.int64)
    for window in range(num_windows):
        for batch_size in rng.poisson(rng.uniform(5, 25), 200).clip(1, MAX_BATCH_SIZE):
            histogram[window, batch_size, GRID.cell(context, 1)] += 1
    return ListTraffic(step_times(costs, sizes, MAX_BATCH_SIZE, 0, GRID), histogram, None)


def window_times(costs: CostTable, sizes: list[int], num_windows: int = 20) -> WindowTimes:
    return WindowTimes.of(costs, traffic(costs, sizes, num_windows))


def test_the_windows_times_add_up_to_the_steps_times(costs: CostTable) -> None:
    here = traffic(costs, [8, 24, 64])
    times = WindowTimes.of(costs, here)
    expected_ms = (here.histogram * here.times.decode_ns).sum() / 1e6
    assert times.ms_by_point.sum() == pytest.approx(expected_ms)
    assert times.num_steps.sum() == here.histogram.sum()


def test_a_time_is_traced_to_the_measurements_behind_it(costs: CostTable) -> None:
    assert set(window_times(costs, [20, 64]).points) == {("graph", 16), ("graph", 24), ("graph", 64)}


def test_a_clear_gain_has_an_interval_above_zero(costs: CostTable) -> None:
    comparison = compare(window_times(costs, [16, 32, 64]), window_times(costs, [64]), EVERYTHING)
    assert comparison is not None and comparison.interval is not None
    assert comparison.is_better and not comparison.is_worse
    assert comparison.interval[0] < comparison.gain < comparison.interval[1]


def test_what_was_not_measured_makes_no_list_better_or_worse(costs: CostTable) -> None:
    """A larger graph is measured to more tokens, so a list of smaller ones looks fast where its times are held."""
    few, many = (WindowTimes.of(costs, traffic(costs, sizes, context=4000)) for sizes in ([64], [16, 32, 64]))
    comparison = compare(many, few, EVERYTHING)
    assert comparison is not None and comparison.interval is not None and comparison.interval[0] > 0
    assert not comparison.is_measured and comparison.beyond_share > 0.5
    assert not (comparison.is_better or comparison.is_no_worse or comparison.is_worse)


def test_the_share_beyond_the_measurements_is_that_of_the_steps(costs: CostTable) -> None:
    inside, beyond = (traffic(costs, [8, 64], context=context) for context in (500, 4000))
    histogram = np.concatenate([inside.histogram, beyond.histogram])
    # The graph of 8 rows is measured to 2048 tokens each, that of 64 to more than 30 requests of 4000 have.
    histogram[:, 31:] = 0
    times = WindowTimes.of(costs, ListTraffic(inside.times, histogram, None))
    expected = histogram[20:, 5:9].sum() / histogram.sum()
    assert 0 < expected == pytest.approx(times.beyond_share(EVERYTHING))
    assert times.beyond_share(slice(0, 20)) == 0


def test_the_same_list_gains_nothing(costs: CostTable) -> None:
    comparison = compare(window_times(costs, [16, 64]), window_times(costs, [16, 64]), EVERYTHING)
    assert comparison is not None
    assert comparison.gain == 0.0 and comparison.interval == (0.0, 0.0)
    assert not comparison.is_better


def test_noisy_costs_widen_the_interval_until_it_includes_zero(tmp_path: Path) -> None:
    noisy = load_costs(write_run(tmp_path, rel_std=3.0))
    comparison = compare(window_times(noisy, [16, 40, 64]), window_times(noisy, [16, 48, 64]), EVERYTHING)
    assert comparison is not None and comparison.interval is not None
    assert comparison.interval[0] < 0 < comparison.interval[1]
    assert not comparison.is_better


def test_few_windows_support_no_interval(costs: CostTable) -> None:
    comparison = compare(window_times(costs, [16, 64], 3), window_times(costs, [64], 3), EVERYTHING)
    assert comparison is not None
    assert comparison.interval is None and not comparison.is_better


def test_windows_without_steps_compare_nothing(costs: CostTable) -> None:
    times = window_times(costs, [16, 64])
    assert compare(times, times, slice(20, None)) is None
