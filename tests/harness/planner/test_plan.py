from __future__ import annotations

import numpy as np
import pytest

from harness.planner.contexts import ContextGrid
from harness.planner.cost import CostTable
from harness.planner.cost_source import load_costs
from harness.planner.lists import NamedList, engine_lists
from harness.planner.optimise import Budget
from harness.planner.plan import Plan, Planner
from harness.planner.traffic import SimulatedTraffic
from harness.scheduler import SchedulerLimits
from runners.capture_sizes import POLICIES
from tests.harness.planner.measured_run import MAX_BATCH_SIZE, poisson, write_run

LIMITS = SchedulerLimits(MAX_BATCH_SIZE, 20_000, 16, 512, 4096)


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> CostTable:
    return load_costs(write_run(tmp_path_factory.mktemp("run"), rel_std=0.001))


def planner(
    costs: CostTable,
    default: tuple[int, ...],
    budget: Budget | None = None,
    limits: SchedulerLimits = LIMITS,
    num_requests: int = 3000,
    rate: float = 12.0,
) -> Planner:
    workload = poisson(num_requests, rate)
    traffic = SimulatedTraffic(
        costs, workload, lambda sizes: limits, ContextGrid.up_to(4096), 20, limits.max_batch_size
    )
    candidates = costs.candidates(limits.max_batch_size)
    return Planner(costs, traffic, candidates, NamedList("mine", default), budget)


@pytest.fixture(scope="module")
def plan(costs: CostTable) -> Plan:
    return planner(costs, (MAX_BATCH_SIZE,)).plan()


def test_a_poor_default_is_replaced(plan: Plan) -> None:
    assert plan.is_recommended
    assert plan.default.against is not None and plan.default.against.gain > 0.05


def test_the_plan_covers_the_largest_batch(plan: Plan) -> None:
    assert plan.choice.sizes[-1] == MAX_BATCH_SIZE


def test_the_plan_is_the_fixed_point_of_choosing_and_simulating(costs: CostTable, plan: Plan) -> None:
    assert plan.converged
    assert plan.rounds[0] == (MAX_BATCH_SIZE,)
    assert plan.rounds[-1] == plan.choice.sizes
    again = planner(costs, plan.choice.sizes).plan()
    assert again.choice.sizes == plan.choice.sizes


def test_a_default_that_is_as_good_is_kept(costs: CostTable, plan: Plan) -> None:
    assert not planner(costs, plan.choice.sizes).plan().is_recommended


def test_without_a_budget_no_engines_list_is_faster_where_it_was_fitted(costs: CostTable, plan: Plan) -> None:
    assert all(row.against is not None and row.against.gain > -1e-3 for row in plan.engines)
    assert plan.choice.num_graphs < min(len(row.sizes) for row in plan.engines if row.name == "vllm")


def test_every_engine_is_judged_with_and_without_its_own_gap(plan: Plan) -> None:
    names = {row.name for row in plan.engines}
    assert {name for name, policy in POLICIES.items() if policy.engine_version} <= names
    assert "tgi, own gap" in names


def test_a_budget_is_kept(costs: CostTable) -> None:
    plan = planner(costs, (MAX_BATCH_SIZE,), Budget(max_graphs=3, memory_mib=85.0)).plan()
    assert plan.choice.num_graphs <= 3
    assert plan.plan.device_bytes <= 85 * 2**20


def test_graphs_that_take_pages_away_cause_preemptions(costs: CostTable) -> None:
    scarce = SchedulerLimits(MAX_BATCH_SIZE, 60, 16, 512, 4096)
    rich = planner(costs, (MAX_BATCH_SIZE,), Budget(2), num_requests=400).plan()
    poor = planner(costs, (MAX_BATCH_SIZE,), Budget(2), limits=scarce, num_requests=400).plan()
    assert rich.plan.traffic.simulation is not None and poor.plan.traffic.simulation is not None
    assert rich.plan.traffic.simulation.num_preemptions == 0
    assert poor.plan.traffic.simulation.num_preemptions > 0


def test_too_little_traffic_keeps_the_default(costs: CostTable) -> None:
    plan = planner(costs, (MAX_BATCH_SIZE,), num_requests=5).plan()
    assert not plan.is_recommended


def test_the_front_falls_with_every_graph_more(plan: Plan) -> None:
    assert np.all(np.diff([choice.step_ms for choice in plan.front]) < 0)


@pytest.mark.parametrize("max_batch_size", [1, 7, 42, 300])
def test_engines_lists_are_covered_and_own_gaps_are_not(max_batch_size: int) -> None:
    for engine in engine_lists(max_batch_size):
        has_gap = engine.name.endswith("own gap")
        assert (engine.sizes[-1] == max_batch_size) is not has_gap
