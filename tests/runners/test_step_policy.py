"""Contract 10: nothing is silent. Every step without its own graph has a reason, a count and a remedy."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.errors import NoUsableGraphError, RunnerError
from runners.padding import STRATEGIES, StepCosts, StepPlan
from runners.step_policy import StepLog, StepPolicy


def policy(**overrides: Any) -> StepPolicy:
    settings = {"padding": "nearest", "above_max": "eager", "on_miss": "eager", "graph_backend": "emulated"}
    return StepPolicy([1, 2, 4], **{**settings, **overrides})


def test_above_max_eager_runs_the_batch_unpadded_and_says_why() -> None:
    assert policy(above_max="eager").plan(5) == StepPlan("eager", (), "above_max")


def test_above_max_split_covers_the_batch_with_the_largest_graphs() -> None:
    assert policy(above_max="split").plan(7) == StepPlan("split", (4, 4), "above_max")
    assert policy(above_max="split").plan(9) == StepPlan("split", (4, 4, 1), "above_max")


def test_above_max_split_uses_measured_costs_if_there_are_any() -> None:
    chosen = policy(above_max="split")
    chosen.set_costs(StepCosts(graph_ms={1: 5.0, 2: 1.0, 4: 3.0}))

    assert chosen.plan(6).sizes == (2, 2, 2)


def test_above_max_error_names_the_batch_the_ceiling_and_the_remedy() -> None:
    with pytest.raises(NoUsableGraphError, match=r"batch of 5 is refused.*largest capture size, 4.*Raise"):
        policy(above_max="error").plan(5)


@pytest.mark.parametrize("padding", STRATEGIES)
@pytest.mark.parametrize(("above_max", "mode"), [("eager", "eager"), ("split", "split")])
def test_above_max_decides_alone_whatever_the_strategy_and_on_miss(
    padding: str, above_max: str, mode: str
) -> None:
    chosen = policy(padding=padding, above_max=above_max, on_miss="error")

    assert chosen.plan(5).mode == mode


def test_on_miss_decides_for_batches_within_range() -> None:
    assert policy(padding="exact").plan(3) == StepPlan("eager", (), "not_captured")
    with pytest.raises(NoUsableGraphError, match=r"batch of 3 is refused: padding=exact"):
        policy(padding="exact", on_miss="error").plan(3)


def test_cheaper_eager_is_a_choice_and_not_a_miss() -> None:
    chosen = policy(padding="cheapest", on_miss="error")
    chosen.set_costs(StepCosts(graph_ms={4: 2.0}, eager_ms={3: 1.0}))

    assert chosen.plan(3) == StepPlan("eager", (), "cheaper_eager")


def test_an_idle_batch_takes_the_smallest_graph() -> None:
    assert policy(padding="exact", on_miss="error").plan(0) == StepPlan("graph", (1,), "idle")


def test_new_costs_change_the_plans() -> None:
    chosen = policy(padding="cheapest")
    assert chosen.plan(2).reason == "no_costs"

    chosen.set_costs(StepCosts(graph_ms={2: 2.0, 4: 1.0}))
    assert chosen.plan(2) == StepPlan("graph", (4,), "cheaper_size")

    chosen.set_costs(None)
    assert chosen.plan(2).reason == "no_costs"


def test_costs_of_another_graph_backend_are_refused() -> None:
    with pytest.raises(RunnerError, match="measured on emulated graphs, but this runner's are cuda"):
        policy(graph_backend="cuda").set_costs(StepCosts({1: 1.0}, graph_backend="emulated"))


@pytest.mark.parametrize(
    "plan",
    [StepPlan("graph", (4,)), StepPlan("split", (2, 1)), StepPlan("eager", (5,)), StepPlan("eager")],
)
def test_a_possible_forced_plan_is_taken_and_called_forced(plan: StepPlan) -> None:
    assert policy().check_forced(3, plan) == StepPlan(plan.mode, plan.sizes, "forced")


def test_a_plan_that_is_forced_again_is_checked_for_each_batch() -> None:
    chosen, plan = policy(), StepPlan("graph", (4,))
    for batch_size in (3, 3, 4, 3):
        assert chosen.check_forced(batch_size, plan) == StepPlan("graph", (4,), "forced")
    with pytest.raises(RunnerError, match="batch of 5 is impossible"):
        chosen.check_forced(5, plan)
    assert chosen.check_forced(2, StepPlan("graph", (2,))).sizes == (2,)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (StepPlan("graph", (3,)), r"sizes \[3\] are not captured, only \[1, 2, 4\]"),
        (StepPlan("graph", (2,)), "impossible"),
        (StepPlan("graph", (2, 1)), "impossible"),
        (StepPlan("graph"), "impossible"),
        (StepPlan("split", (2,)), "impossible"),
        (StepPlan("split", (4, 4)), "impossible"),
        (StepPlan("split"), "impossible"),
        (StepPlan("eager", (2,)), "impossible"),
        (StepPlan("compiled", (4,)), r"sizes \[4\] are not compiled, only \[\]"),
        (StepPlan("compiled"), "impossible"),
    ],
)
def test_an_impossible_forced_plan_is_refused(plan: StepPlan, message: str) -> None:
    with pytest.raises(RunnerError, match=message):
        policy().check_forced(3, plan)


def test_each_reason_is_warned_about_once_with_batch_ceiling_and_remedy() -> None:
    log = StepLog(policy())
    with pytest.warns(RuntimeWarning, match=r"batch of 5 runs eager: .*size, 4\. Raise .*only counted"):
        log.add(5, StepPlan("eager", (), "above_max"), 1000)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log.add(6, StepPlan("eager", (), "above_max"), 1000)
    with pytest.warns(RuntimeWarning, match="finds no captured size"):
        log.add(3, StepPlan("eager", (), "not_captured"), 1000)

    assert len(log.warnings) == 2
    assert log.counts == {("eager", "above_max"): 2, ("eager", "not_captured"): 1}


def test_ordinary_steps_are_counted_without_a_warning() -> None:
    log = StepLog(policy())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log.add(3, StepPlan("graph", (4,)), 2500)

    assert log.outcome is not None
    assert (log.outcome.batch_size, log.outcome.padded_batch_size, log.outcome.num_graphs) == (3, 4, 1)
    assert log.outcome.host_prepare_us == 2.5
    assert log.counts == {("graph", ""): 1}


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6, unique=True),
    padding=st.sampled_from(list(STRATEGIES)),
    above_max=st.sampled_from(["eager", "split"]),
    costs=st.dictionaries(st.integers(1, 40), st.floats(0.1, 9.0), max_size=6),
    batch_size=st.integers(0, 90),
)
def test_every_plan_is_one_that_could_have_been_forced(
    sizes: list[int], padding: str, above_max: Any, costs: dict[int, float], batch_size: int
) -> None:
    chosen = StepPolicy(
        sizes, padding=padding, above_max=above_max, on_miss="eager", graph_backend="emulated"
    )
    chosen.set_costs(StepCosts(graph_ms=costs, eager_ms=costs))
    plan = chosen.plan(batch_size)

    assert chosen.check_forced(batch_size, plan).sizes == plan.sizes
    assert plan.padded_batch_size(batch_size) >= batch_size
