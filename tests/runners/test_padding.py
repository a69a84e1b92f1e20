"""The padding strategies, each against what it promises, with injected costs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.padding import STRATEGIES, StepCosts, StepPlan, create_strategy, greedy_sizes, split_sizes

SIZES = (1, 2, 4, 8)


def graph(size: int, reason: str = "") -> StepPlan:
    return StepPlan("graph", (size,), reason)


def test_nearest_takes_the_smallest_captured_size_that_holds_the_batch() -> None:
    strategy = create_strategy("nearest", SIZES)

    assert [strategy.plan(n) for n in (1, 2, 3, 5, 8)] == [graph(s) for s in (1, 2, 4, 8, 8)]


def test_exact_takes_captured_sizes_only() -> None:
    strategy = create_strategy("exact", SIZES)

    assert strategy.plan(4) == graph(4)
    assert strategy.plan(3) is None


def test_max_takes_the_largest_graph_for_every_batch() -> None:
    strategy = create_strategy("max", SIZES)

    assert strategy.plan(1) == strategy.plan(8) == graph(8)


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_strategy_has_a_graph_above_the_largest_size(name: str) -> None:
    costs = StepCosts(graph_ms=dict.fromkeys(SIZES, 1.0))

    assert create_strategy(name, SIZES, costs).plan(9) is None


@pytest.mark.parametrize("name", ["cheapest", "split"])
@pytest.mark.parametrize("costs", [None, StepCosts(), StepCosts(eager_ms={3: 0.1})])
def test_without_measured_graphs_the_nearest_size_is_taken_and_said_so(
    name: str, costs: StepCosts | None
) -> None:
    assert create_strategy(name, SIZES, costs).plan(3) == graph(4, "no_costs")


def test_cheapest_takes_a_larger_size_when_it_is_faster() -> None:
    strategy = create_strategy("cheapest", SIZES, StepCosts(graph_ms={1: 1.0, 2: 1.0, 4: 3.0, 8: 2.0}))

    assert strategy.plan(3) == graph(8, "cheaper_size")
    assert strategy.plan(2) == graph(2)


def test_cheapest_runs_eager_when_that_is_measured_faster() -> None:
    costs = StepCosts(graph_ms={4: 2.0, 8: 3.0}, eager_ms={3: 1.5, 4: 2.0})
    strategy = create_strategy("cheapest", SIZES, costs)

    assert strategy.plan(3) == StepPlan("eager", (), "cheaper_eager")
    assert strategy.plan(4) == graph(4), "on a tie the graph stays"
    assert strategy.plan(5) == graph(8), "eager was not measured at 5"


def test_cheapest_takes_less_padding_on_a_tie() -> None:
    strategy = create_strategy("cheapest", SIZES, StepCosts(graph_ms={4: 2.0, 8: 2.0}))

    assert strategy.plan(3) == graph(4)


def test_cheapest_ignores_sizes_that_were_not_measured() -> None:
    strategy = create_strategy("cheapest", SIZES, StepCosts(graph_ms={8: 2.0}))

    assert strategy.plan(3) == graph(8, "cheaper_size")


def test_split_takes_several_graphs_only_when_their_sum_is_lower() -> None:
    costs = StepCosts(graph_ms={1: 1.0, 2: 1.2, 4: 1.5, 8: 4.0})
    strategy = create_strategy("split", SIZES, costs)

    assert strategy.plan(5) == StepPlan("split", (4, 1), "cheaper_split")
    assert strategy.plan(4) == graph(4)
    assert strategy.plan(8) == StepPlan("split", (4, 4), "cheaper_split")


def test_split_takes_fewer_graphs_on_a_tie() -> None:
    strategy = create_strategy("split", (1, 2, 3), StepCosts(graph_ms={1: 0.1, 2: 0.2, 3: 0.3}))

    assert strategy.plan(3) == graph(3)
    assert strategy.plan(2) == graph(2)


COSTS = st.dictionaries(st.integers(1, 9), st.integers(1, 20).map(lambda x: x / 8), min_size=1, max_size=5)


@given(costs=COSTS, batch_size=st.integers(1, 14))
def test_split_is_as_cheap_as_the_best_of_all_combinations(costs: dict[int, float], batch_size: int) -> None:
    sizes = sorted(costs)
    parts = split_sizes(batch_size, sizes, StepCosts(graph_ms=costs))

    assert parts is not None
    assert list(parts) == sorted(parts, reverse=True)
    assert sum(parts) >= batch_size > sum(parts[:-1]), "every part gets a request"
    every = (
        combination
        for count in range(1, -(-batch_size // sizes[0]) + 1)
        for combination in itertools.combinations_with_replacement(sizes, count)
        if sum(combination) >= batch_size
    )
    best = min((sum(costs[s] for s in c), len(c)) for c in every)
    assert (sum(costs[s] for s in parts), len(parts)) == best


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=8, unique=True).map(sorted),
    batch_size=st.integers(1, 400),
)
def test_greedy_parts_hold_the_batch_with_a_request_in_each(sizes: list[int], batch_size: int) -> None:
    parts = greedy_sizes(batch_size, sizes)

    assert set(parts) <= set(sizes)
    assert sum(parts) >= batch_size > sum(parts[:-1])


def test_padding_waste_of_a_plan_is_the_padded_size_less_the_batch() -> None:
    assert graph(16).padded_batch_size(9) == 16
    assert StepPlan("split", (8, 2)).padded_batch_size(9) == 10
    assert StepPlan("eager").padded_batch_size(9) == 9


def test_costs_survive_a_file(tmp_path: Path) -> None:
    costs = StepCosts({1: 0.5, 8: 1.25}, {3: 2.0}, graph_backend="cuda")
    costs.save(tmp_path / "costs.csv")

    assert StepCosts.from_sizes_csv(tmp_path / "costs.csv") == costs


def test_costs_come_from_the_sweep_s_unpadded_steps_of_one_context_length() -> None:
    def row(batch: int, padded: int, mode: str, context: int, ms: float | None) -> dict[str, object]:
        return {
            "batch_size": batch,
            "padded_batch_size": padded,
            "mode": mode,
            "graph_backend": "none" if mode == "eager" else "emulated",
            "context_len": context,
            "step_ms_p50": ms,
        }

    rows = [
        row(4, 4, "graph", 128, 1.0),
        row(3, 4, "graph", 128, 9.0),
        row(3, 3, "eager", 128, 2.0),
        row(8, 8, "graph", 128, None),
        row(4, 4, "graph", 4096, 7.0),
        row(6, 6, "split", 128, 5.0),
    ]

    assert StepCosts.from_rows(rows) == StepCosts({4: 1.0}, {3: 2.0}, graph_backend="emulated")


def test_compiled_steps_of_inductor_s_own_graphs_stand_for_graphs() -> None:
    row = {"batch_size": 4, "padded_batch_size": 4, "mode": "compiled", "graph_backend": "inductor"}

    costs = StepCosts.from_rows([{**row, "context_len": 128, "step_ms_p50": 1.0}])

    assert costs == StepCosts({4: 1.0}, graph_backend="inductor")


def test_a_costs_file_without_the_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("batch_size,mode\n1,graph\n")

    with pytest.raises(ValueError, match=r"lacks the columns \['padded_batch_size'.*sizes.csv"):
        StepCosts.from_sizes_csv(path)


def test_an_unknown_strategy_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="padding.strategy=nearst is unknown: choose from nearest"):
        create_strategy("nearst", SIZES)


@pytest.mark.parametrize(
    ("name", "batch_size", "plan", "gain_ms"),
    [
        ("cheapest", 3, StepPlan("graph", (8,), "cheaper_size"), 0.5),
        ("cheapest", 5, StepPlan("eager", (), "cheaper_eager"), 2.5),
        ("split", 3, StepPlan("split", (2, 1), "cheaper_split"), 1.0),
    ],
)
def test_a_gain_within_the_noise_of_what_did_not_settle_is_no_gain(
    name: str, batch_size: int, plan: StepPlan, gain_ms: float
) -> None:
    graph_ms = {1: 2.0, 2: 2.0, 4: 5.0, 8: 4.5}
    quiet = StepCosts(graph_ms, {5: 2.0})
    assert create_strategy(name, (1, 2, 4, 8), quiet).plan(batch_size) == plan
    nearest = 4 if batch_size == 3 else 8
    for noise_ms, chosen in ((0.9 * gain_ms, plan), (1.1 * gain_ms, graph(nearest, "noisy_costs"))):
        noisy = replace(quiet, graph_noise_ms={nearest: noise_ms})
        assert create_strategy(name, (1, 2, 4, 8), noisy).plan(batch_size) == chosen


def test_only_rows_that_did_not_settle_are_noisy(tmp_path: Path) -> None:
    row = {"batch_size": 4, "padded_batch_size": 4, "context_len": 8, "step_ms_p50": 2.0, "rel_iqr": 0.3}
    graph_row = {**row, "mode": "graph", "graph_backend": "emulated", "unmet_condition": "rel_iqr 0.3 > 0.05"}
    eager_row = {**row, "mode": "eager", "graph_backend": "none", "unmet_condition": None}
    costs = StepCosts.from_rows([graph_row, eager_row])
    assert costs.graph_noise_ms == {4: pytest.approx(0.6)}
    assert costs.eager_noise_ms == {}
    costs.save(tmp_path / "costs.csv")
    assert StepCosts.from_sizes_csv(tmp_path / "costs.csv") == costs
