from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.planner.contexts import ContextGrid
from harness.planner.cost import CostTable
from harness.planner.cost_source import load_costs
from harness.planner.halves import HalfSize
from harness.planner.lists import NamedList
from harness.planner.optimise import Budget
from harness.planner.plan import Plan, Planner
from harness.planner.traffic import LoggedTraffic, SimulatedTraffic, Traffic
from harness.scheduler import SchedulerLimits
from tests.harness.planner.measured_run import MAX_BATCH_SIZE, SIZES, poisson, write_run

GRID = ContextGrid.up_to(4096)
SMALLER = st.sets(st.sampled_from(SIZES[:-1]), min_size=1, max_size=len(SIZES) - 1)


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> CostTable:
    """Measured so well that no difference between two sizes is noise."""
    return load_costs(write_run(tmp_path_factory.mktemp("run"), rel_std=1e-5))


def steady(costs: CostTable, batches: Sequence[int], num_windows: int = 20) -> LoggedTraffic:
    """As many steps of each batch size in every window, and one of the largest, at a context of 500."""
    histogram = np.zeros((num_windows, MAX_BATCH_SIZE + 1, GRID.num_cells), dtype=np.int64)
    for batch_size in [*batches, MAX_BATCH_SIZE]:
        histogram[:, batch_size, GRID.cell(500 * batch_size, batch_size)] = 100
    return LoggedTraffic(costs, histogram, GRID)


def simulated(costs: CostTable) -> SimulatedTraffic:
    limits = SchedulerLimits(MAX_BATCH_SIZE, 20_000, 16, 512, 4096)
    return SimulatedTraffic(costs, poisson(1500, 12.0), lambda sizes: limits, GRID, 20, MAX_BATCH_SIZE)


def plan_for(
    costs: CostTable, traffic: Traffic, default: Sequence[int], budget: Budget | None = None
) -> Plan:
    named = NamedList("mine", tuple(sorted(default)))
    return Planner(costs, traffic, costs.candidates(MAX_BATCH_SIZE), named, budget).plan()


def half_of_mine(plan: Plan) -> HalfSize:
    (row,) = [row for row in plan.halves if row.engine.name == "mine"]
    return row


@settings(max_examples=12, deadline=None)
@given(SMALLER)
def test_a_list_with_a_graph_for_each_batch_that_runs_is_kept(costs: CostTable, batches: set[int]) -> None:
    """Every one of its graphs is needed: half of them are slower, in hindsight too."""
    planted = [*batches, MAX_BATCH_SIZE]
    row = half_of_mine(plan_for(costs, steady(costs, sorted(batches)), planted))
    assert len(row.half.sizes) <= len(planted) // 2
    assert not row.is_adopted and row.reason == "slower"
    assert row.regret is not None and row.regret > 0
    assert row.hindsight_gain is not None and row.hindsight_gain < 0


@settings(max_examples=12, deadline=None)
@given(st.sets(st.sampled_from(SIZES[:-1]), min_size=1, max_size=len(SIZES) // 2 - 1), st.data())
def test_a_list_with_twice_the_graphs_that_run_is_halved(
    costs: CostTable, batches: set[int], data: st.DataObject
) -> None:
    unused = sorted(set(SIZES[:-1]) - batches)
    waste = data.draw(
        st.sets(st.sampled_from(unused), min_size=len(batches) + 1, max_size=len(unused)), label="waste"
    )
    row = half_of_mine(plan_for(costs, steady(costs, sorted(batches)), [*batches, *waste, MAX_BATCH_SIZE]))
    assert len(row.half.sizes) <= len(row.engine.sizes) // 2
    assert row.is_adopted and row.reason == "no_slower"
    assert row.regret == pytest.approx(0.0, abs=1e-9)


def test_every_list_in_use_has_a_verdict(costs: CostTable) -> None:
    plan = plan_for(costs, simulated(costs), SIZES)
    assert [row.engine.name for row in plan.halves] == ["mine", *(row.name for row in plan.engines)]
    for row in plan.halves:
        assert len(row.half.sizes) <= max(1, len(row.engine.sizes) // 2)


def test_a_half_list_is_the_plan_of_half_the_graphs(costs: CostTable) -> None:
    traffic = simulated(costs)
    row = half_of_mine(plan_for(costs, traffic, SIZES))
    again = plan_for(costs, traffic, SIZES, Budget(max_graphs=len(SIZES) // 2))
    assert row.half.sizes == again.choice.sizes
    assert row.comparison == again.default.against


def test_a_half_list_keeps_the_budget(costs: CostTable) -> None:
    plan = plan_for(costs, steady(costs, SIZES), SIZES, Budget(max_graphs=3, memory_mib=82.0))
    for row in plan.halves:
        assert len(row.half.sizes) <= 3
        assert row.half.device_bytes <= 82 * 2**20


def test_the_largest_graph_alone_cannot_be_halved(costs: CostTable) -> None:
    row = half_of_mine(plan_for(costs, steady(costs, [3]), [MAX_BATCH_SIZE]))
    assert row.half.sizes == row.engine.sizes == (MAX_BATCH_SIZE,)
    assert not row.is_adopted and row.reason == "same_list"


def test_few_windows_keep_the_list(costs: CostTable) -> None:
    row = half_of_mine(plan_for(costs, steady(costs, [3], num_windows=6), SIZES))
    assert not row.is_adopted and row.reason == "too_little_traffic"


def test_what_was_not_measured_keeps_the_list(costs: CostTable) -> None:
    row = half_of_mine(plan_for(costs, steady(costs, [3]), SIZES))
    assert row.is_adopted and row.comparison is not None
    beyond = replace(row, comparison=replace(row.comparison, beyond_share=0.06))
    assert not beyond.is_adopted and beyond.reason == "not_measured"


def test_what_noise_cannot_tell_from_slower_keeps_the_list(tmp_path_factory: pytest.TempPathFactory) -> None:
    noisy = load_costs(write_run(tmp_path_factory.mktemp("noisy"), rel_std=3.0))
    row = half_of_mine(plan_for(noisy, steady(noisy, [40]), [48, MAX_BATCH_SIZE]))
    assert not row.is_adopted and row.reason == "within_noise"
