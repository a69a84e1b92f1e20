"""Which way a step goes: nothing is silent, and idle, split and forced steps do what they say."""

from __future__ import annotations

import pytest
import torch

from runners.errors import (
    NoUsableGraphError,
    RunnerError,
)
from runners.forward_batch import ForwardBatch, ForwardMode
from runners.model_runner import ModelRunner
from runners.padding import StepCosts, StepPlan
from tests.runners.tiny_runner import (
    EAGER,
    Requests,
    assert_same_tokens,
    graphs_of,
    logits,
    tiny_runner,
)

# --- contract 10: nothing is silent ----------------------------------------------------------------


def test_steps_add_up_and_the_first_of_each_kind_is_warned_about() -> None:
    with tiny_runner(capture_sizes=(2, 4), padding="exact") as runner:
        graphs, requests = graphs_of(runner), Requests(runner)
        with pytest.warns(RuntimeWarning) as caught:
            for n in (2, 3, 4, 5, 8, 3, 0):
                runner.forward(requests.first(n))

        assert graphs.outcome_counts == {
            ("graph", ""): 2,
            ("eager", "not_captured"): 2,
            ("eager", "above_max"): 2,
            ("graph", "idle"): 1,
        }
        assert [str(w.message).split(":")[0] for w in caught] == [
            "a decode batch of 3 runs eager",
            "a decode batch of 5 runs eager",
        ]
        assert len(graphs.warnings) == 2


def test_a_batch_that_may_not_run_is_refused_and_can_run_says_so() -> None:
    with tiny_runner(capture_sizes=(2, 4), above_max="error") as runner:
        batch = Requests(runner).first(5)

        assert not graphs_of(runner).can_run(batch)
        with pytest.raises(NoUsableGraphError, match="batch of 5 is refused"):
            runner.forward(batch)


def test_can_run_is_true_only_if_replay_would_use_graphs() -> None:
    with tiny_runner(capture_sizes=(2, 4), padding="exact", above_max="split") as runner:
        graphs, requests = graphs_of(runner), Requests(runner)

        assert [graphs.can_run(requests.first(n)) for n in (0, 1, 2, 3, 4, 5, 8)] == [
            True,  # idle: the smallest graph
            False,
            True,
            False,
            True,
            True,  # split
            True,
        ]
        prefill = requests.first(2)
        prefill.forward_mode = ForwardMode.EXTEND
        assert not graphs.can_run(prefill)
        with pytest.raises(RunnerError, match="extend batch has no graph"):
            graphs.replay(prefill)


# --- idle, split, costs ----------------------------------------------------------------------------


def test_an_idle_batch_replays_the_smallest_graph_and_returns_no_row(runner: ModelRunner) -> None:
    output = runner.forward(ForwardBatch.idle())

    assert output.next_token_logits.shape == (0, runner.vocab_size)
    outcome = runner.outcome
    assert outcome is not None
    assert (outcome.mode, outcome.reason, outcome.sizes) == ("graph", "idle", (1,))


@pytest.mark.parametrize("sizes", [(4, 4), (4, 2, 1), (2, 4, 1), (1, 8)])
def test_the_parts_of_a_split_equal_the_same_requests_decoded_alone(
    runner: ModelRunner, sizes: tuple[int, ...]
) -> None:
    requests = Requests(runner)
    split = logits(runner, requests.first(7), StepPlan("split", sizes))

    outcome = runner.outcome
    assert outcome is not None
    assert (outcome.mode, outcome.num_graphs, outcome.padded_batch_size) == ("split", len(sizes), sum(sizes))
    first = 0
    for size in sizes:
        end = min(first + size, 7)
        part = requests.batch(*range(first, end))
        assert torch.equal(split[first:end], logits(runner, part, StepPlan("graph", (size,))))
        first = end


def test_a_batch_above_the_largest_graph_is_split_where_that_is_the_policy() -> None:
    with tiny_runner(capture_sizes=(1, 2), above_max="split") as runner:
        batch = Requests(runner).first(8)
        with pytest.warns(RuntimeWarning, match="runs split"):
            replayed = logits(runner, batch)

        assert runner.outcome.sizes == (2, 2, 2, 2)  # type: ignore[union-attr]
        assert_same_tokens(replayed, logits(runner, batch, EAGER))


def test_split_logits_live_apart_from_the_graphs_output(runner: ModelRunner) -> None:
    requests = Requests(runner)
    returned = runner.forward(requests.first(3), StepPlan("split", (2, 1))).next_token_logits
    kept = returned.clone()
    runner.forward(requests.batch(4, 5, 6), StepPlan("graph", (4,)))

    assert torch.equal(returned, kept)


def test_measured_costs_steer_cheapest_and_split() -> None:
    with tiny_runner(padding="split") as runner:
        graphs, requests = graphs_of(runner), Requests(runner)
        runner.forward(requests.first(5))
        assert runner.outcome.reason == "no_costs"  # type: ignore[union-attr]

        graphs.set_step_costs(StepCosts(graph_ms={1: 1.0, 2: 1.1, 4: 1.2, 8: 9.0}))
        runner.forward(requests.first(5))
        assert runner.outcome.sizes == (4, 1)  # type: ignore[union-attr]
        assert graphs.plan(3) == StepPlan("graph", (4,))


def test_host_prepare_is_measured_for_every_mode(runner: ModelRunner) -> None:
    requests = Requests(runner)
    for plan in (None, EAGER, StepPlan("eager", (4,)), StepPlan("split", (2, 1))):
        runner.forward(requests.first(3), plan)
        assert runner.outcome.host_prepare_us > 0  # type: ignore[union-attr]


def test_forced_plans_are_checked_before_anything_runs(runner: ModelRunner) -> None:
    batch = Requests(runner).first(3)
    with pytest.raises(RunnerError, match=r"sizes \[3\] are not captured"):
        runner.forward(batch, StepPlan("graph", (3,)))
    with pytest.raises(RunnerError, match="cannot be padded to 9 rows"):
        runner.forward(batch, StepPlan("eager", (9,)))
