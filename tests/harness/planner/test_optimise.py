from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import ConfigError
from harness.planner.constrained import search
from harness.planner.cost import CostTable
from harness.planner.cost_source import load_costs
from harness.planner.histogram import BatchHistogram, spread
from harness.planner.optimise import Budget, optimise, pareto_front
from harness.planner.problem import CaptureProblem, capture_problem, mix
from runners.padding import create_strategy
from tests.harness.planner.measured_run import MAX_BATCH_SIZE, SIZES, write_run

MIB = 1024**2


@st.composite
def problems(draw: st.DrawFn) -> CaptureProblem:
    """Up to 12 sizes; times that rise and fall, and any share of batches that never run."""
    num_sizes = draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = np.sort(rng.choice(np.arange(1, 31), num_sizes, replace=False))
    size_ms = rng.uniform(1, 6, num_sizes)
    weight = rng.random(sizes[-1] + 1) * (rng.random(sizes[-1] + 1) < draw(st.sampled_from([0.2, 0.8, 1.0])))
    weight[sizes[-1]] += 0.1
    cumulative = np.cumsum(weight) - weight[0]
    bounds = [0, *sizes]
    arc_ms = np.full((num_sizes, num_sizes + 1), np.inf)
    for j, size in enumerate(sizes):
        for i in range(j + 1):
            arc_ms[j, i] = (cumulative[size] - cumulative[bounds[i]]) * size_ms[j]
    uneven = draw(st.booleans())
    return CaptureProblem(
        tuple(sizes.tolist()),
        arc_ms,
        (rng.uniform(1, 12, num_sizes) if uneven else np.full(num_sizes, 8.0)) * MIB,
        rng.uniform(0.05, 0.4, num_sizes),
        float(cumulative[-1]),
        np.ones(num_sizes, dtype=bool),
    )


@st.composite
def budgets(draw: st.DrawFn) -> tuple[float | None, float | None, float | None]:
    """Shares of what all sizes would take; None: no limit."""
    share = st.none() | st.floats(0.0, 1.0)
    return draw(share), draw(share), draw(share)


def budget_of(problem: CaptureProblem, shares: tuple[float | None, float | None, float | None]) -> Budget:
    """Any budget that leaves room for the largest size."""
    graphs, memory, seconds = shares
    room = problem.device_bytes[:-1].sum(), problem.seconds[:-1].sum()
    return Budget(
        None if graphs is None else 1 + round(graphs * (len(problem.sizes) - 1)),
        None if memory is None else float(problem.device_bytes[-1] + memory * room[0]) / MIB,
        None if seconds is None else float(problem.seconds[-1] + seconds * room[1]),
    )


def lists(problem: CaptureProblem) -> Iterable[list[int]]:
    """Every list that ends at the largest size, as indices."""
    last = len(problem.sizes) - 1
    for count in range(last + 1):
        for indices in combinations(range(last), count):
            yield [*indices, last]


def brute_force(problem: CaptureProblem, budget: Budget) -> float:
    def fits(indices: list[int]) -> bool:
        rounding = 1 + 1e-12
        return (
            (budget.max_graphs is None or len(indices) <= budget.max_graphs)
            and (
                budget.memory_mib is None
                or problem.device_bytes[indices].sum() <= budget.memory_mib * MIB * rounding
            )
            and (
                budget.capture_seconds is None
                or problem.seconds[indices].sum() <= budget.capture_seconds * rounding
            )
        )

    return min(
        problem.list_ms([problem.sizes[i] for i in indices]) for indices in lists(problem) if fits(indices)
    )


@settings(max_examples=300, deadline=None)
@given(problems(), budgets())
def test_no_list_within_the_budget_is_faster(
    problem: CaptureProblem, shares: tuple[float | None, float | None, float | None]
) -> None:
    budget = budget_of(problem, shares)
    choice = optimise(problem, budget)
    assert choice.step_ms == pytest.approx(brute_force(problem, budget), rel=1e-9)
    assert choice.gap == 0.0
    assert choice.sizes[-1] == problem.sizes[-1]
    assert budget.max_graphs is None or choice.num_graphs <= budget.max_graphs
    assert budget.memory_mib is None or choice.device_bytes <= budget.memory_mib * MIB * (1 + 1e-9)
    assert budget.capture_seconds is None or choice.seconds <= budget.capture_seconds * (1 + 1e-9)


def by_units(arc_cost: np.ndarray, units: np.ndarray, limits: tuple[int, int]) -> float:
    """The cheapest path when both resources come in whole units: a table over the units used."""
    num_nodes = len(arc_cost)
    shape = limits[0] + 1, limits[1] + 1
    best = [np.full(shape, np.inf) for _ in range(num_nodes + 1)]
    best[0][0, 0] = 0.0
    for node in range(num_nodes):
        reached = np.min([best[i] + arc_cost[node, i] for i in range(node + 1)], axis=0)
        x, y = units[:, node]
        if x < shape[0] and y < shape[1]:
            best[node + 1][x:, y:] = reached[: shape[0] - x, : shape[1] - y]
    return float(best[-1].min())


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.05, 0.6), st.floats(0.05, 0.6))
def test_longer_lists_under_two_limits_are_the_best_ones_too(seed: int, first: float, second: float) -> None:
    rng, number = np.random.default_rng(seed), 40
    size_ms = 4 + 0.05 * np.arange(number) + rng.random(number) * 0.2
    cumulative = np.concatenate([[0.0], np.cumsum(rng.random(number))])
    arc_cost = (cumulative[1:, None] - cumulative[None, :]) * size_ms[:, None]
    arc_cost[np.arange(number + 1)[None, :] > np.arange(number)[:, None]] = np.inf
    units = rng.integers(1, 6, (2, number))
    limits = tuple(
        max(int(u[-1]), round(share * u.sum())) for u, share in zip(units, (first, second), strict=True)
    )
    path, gap = search(arc_cost, units / np.array(limits)[:, None], np.ones(2))
    cost = sum(arc_cost[j, i + 1] for i, j in zip([-1, *path], path, strict=False))
    assert gap == 0.0
    assert cost == pytest.approx(by_units(arc_cost, units, limits), rel=1e-9)  # type: ignore[arg-type]
    assert (units[:, path].sum(axis=1) <= limits).all()


@settings(max_examples=60, deadline=None)
@given(problems())
def test_the_front_has_the_best_list_of_each_number_of_graphs(problem: CaptureProblem) -> None:
    front = pareto_front(problem)
    assert [choice.num_graphs for choice in front] == sorted({choice.num_graphs for choice in front})
    for number in range(1, len(problem.sizes) + 1):
        best = [choice for choice in front if choice.num_graphs <= number][-1]
        assert best.step_ms == pytest.approx(brute_force(problem, Budget(number)), rel=1e-9)


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> CostTable:
    return load_costs(write_run(tmp_path_factory.mktemp("run")))


@st.composite
def histograms(draw: st.DrawFn) -> BatchHistogram:
    batch_size = np.array(draw(st.lists(st.integers(1, 64), min_size=1, max_size=20)))
    context = np.array([draw(st.integers(1, 4096)) for _ in batch_size], dtype=np.float64)
    weight = np.array([draw(st.integers(1, 100)) for _ in batch_size], dtype=np.float64)
    return BatchHistogram(batch_size, batch_size * context, weight)


def strategy_ms(costs: CostTable, histogram: BatchHistogram, sizes: list[int], padding: str) -> float:
    """Mean step time when the runner's own strategy plans every batch."""
    strategy = create_strategy(padding, sizes, costs.step_costs)
    total = 0.0
    for batch, tokens, weight in zip(
        histogram.batch_size, histogram.num_kv_tokens, histogram.weight, strict=True
    ):
        plan = strategy.plan(int(batch))
        assert plan is not None
        at = np.array([tokens])
        step_ms = (
            costs.eager_ms(int(batch), at) if plan.mode == "eager" else costs.graph_ms(plan.sizes[0], at)
        )
        total += float(step_ms[0]) * weight
    return total / histogram.total


@pytest.mark.parametrize("padding", ["nearest", "cheapest"])
@settings(max_examples=25, deadline=None)
@given(histogram=histograms(), max_graphs=st.integers(1, 5))
def test_the_choice_is_the_best_one_under_the_runners_own_rule(
    costs: CostTable, padding: str, histogram: BatchHistogram, max_graphs: int
) -> None:
    candidates = [1, 4, 8, 16, 24, 32, 64]
    problem = capture_problem(costs, histogram, candidates, padding)
    choice = optimise(problem, Budget(max_graphs))
    best = min(
        strategy_ms(costs, histogram, [*subset, 64], padding)
        for count in range(max_graphs)
        for subset in combinations(candidates[:-1], count)
    )
    assert choice.step_ms == pytest.approx(best, rel=1e-9)
    assert strategy_ms(costs, histogram, list(choice.sizes), padding) == pytest.approx(best, rel=1e-9)


def test_cheapest_takes_eager_where_it_is_faster(tmp_path: Path) -> None:
    costs = load_costs(write_run(tmp_path))
    costs.step_costs.eager_ms[3] = 0.5  # as if measured: faster than any graph
    alone = BatchHistogram(np.array([3]), np.array([300.0]), np.array([1.0]))
    problem = capture_problem(costs, alone, SIZES, "cheapest")
    assert optimise(problem).step_ms == pytest.approx(float(costs.eager_ms(3, np.array([300.0]))[0]))


def test_a_mixture_prices_a_list_as_the_sum_of_its_parts(costs: CostTable) -> None:
    histogram = BatchHistogram(np.array([3, 9]), np.array([3000.0, 900.0]), np.array([5.0, 1.0]))
    parts = [capture_problem(costs, h, SIZES) for h in (histogram, spread(MAX_BATCH_SIZE, 500.0))]
    mixed = mix(parts, [2.0, 3.0])
    expected = (2 * 6 * parts[0].list_ms([8, 64]) + 3 * parts[1].list_ms([8, 64])) / (2 * 6 + 3)
    assert mixed.list_ms([8, 64]) == pytest.approx(expected)


def test_sizes_for_comparison_are_priced_and_not_chosen(costs: CostTable) -> None:
    alone = BatchHistogram(np.array([9]), np.array([900.0]), np.array([1.0]))
    problem = capture_problem(costs, alone, [8, 64], compared=[9])
    assert problem.list_ms([9, 64]) < problem.list_ms([8, 64])
    assert optimise(problem).sizes == (64,)


def test_a_batch_above_the_maximum_is_refused(costs: CostTable) -> None:
    above = BatchHistogram(np.array([65]), np.array([65.0]), np.array([1.0]))
    with pytest.raises(ConfigError, match="--max-batch-size"):
        capture_problem(costs, above, SIZES)


@pytest.mark.parametrize(
    ("budget", "field"),
    [
        (Budget(max_graphs=0), "--max-graphs"),
        (Budget(memory_mib=1.0), "--memory-mib"),
        (Budget(capture_seconds=0.01), "--capture-seconds"),
    ],
)
def test_a_budget_that_the_largest_graph_exceeds_is_refused(
    costs: CostTable, budget: Budget, field: str
) -> None:
    alone = BatchHistogram(np.array([9]), np.array([900.0]), np.array([1.0]))
    with pytest.raises(ConfigError, match=field):
        optimise(capture_problem(costs, alone, SIZES), budget)
