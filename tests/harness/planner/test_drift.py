from __future__ import annotations

import numpy as np
import pytest

from harness.planner.cost import CostTable
from harness.planner.cost_source import load_costs
from harness.planner.drift import choose_slack, with_slack
from harness.planner.histogram import BatchHistogram, spread
from harness.planner.optimise import Budget, CaptureChoice, optimise
from harness.planner.problem import CaptureProblem, capture_problem
from tests.harness.planner.measured_run import MAX_BATCH_SIZE, SIZES, write_run


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> CostTable:
    return load_costs(write_run(tmp_path_factory.mktemp("run")))


def window(costs: CostTable, *batch_sizes: int) -> CaptureProblem:
    sizes = np.array(batch_sizes)
    return capture_problem(costs, BatchHistogram(sizes, sizes * 500.0, np.ones(len(sizes))), SIZES)


def three_graphs(problem: CaptureProblem) -> CaptureChoice:
    return optimise(problem, Budget(3))


def everywhere(costs: CostTable) -> CaptureProblem:
    return capture_problem(costs, spread(MAX_BATCH_SIZE, 500.0), SIZES)


def test_within_a_budget_steady_traffic_takes_the_most_slack_that_costs_nothing(costs: CostTable) -> None:
    slack = choose_slack([window(costs, 3, 7, 12)] * 4, everywhere(costs), three_graphs, False)
    free = [share for share, regret in slack.tried.items() if regret <= 1e-4]
    assert slack.share == max(free)
    assert slack.worst_regret is not None and slack.worst_regret <= 1e-4


def test_steady_traffic_needs_no_slack_where_few_graphs_are_wanted(costs: CostTable) -> None:
    slack = choose_slack([window(costs, 3, 7, 12)] * 4, everywhere(costs), three_graphs, True)
    assert slack.share == 0.0
    assert slack.worst_regret == pytest.approx(0.0)


def test_slack_that_steady_traffic_would_pay_for_is_not_taken(costs: CostTable) -> None:
    """Much of it moves one of the two free graphs away from the batches that run."""
    slack = choose_slack([window(costs, 48, 49, 64)] * 4, everywhere(costs), three_graphs, False)
    assert 0.0 < slack.share < 0.1
    assert slack.tried[slack.share] == pytest.approx(0.0) and slack.tried[0.1] > 1e-3


def test_a_window_that_the_others_do_not_show_asks_for_slack(costs: CostTable) -> None:
    windows = [window(costs, 1, 2)] * 4 + [window(costs, 10, 15)]
    slack = choose_slack(windows, everywhere(costs), three_graphs, True)
    assert slack.share > 0.0
    assert slack.worst_regret is not None and slack.worst_regret < slack.tried[0.0]


def test_slack_covers_batches_that_never_ran(costs: CostTable) -> None:
    seen = window(costs, 1, 2)
    assert three_graphs(seen).sizes == (1, 2, 64)
    assert three_graphs(with_slack(seen, everywhere(costs), 0.1)).sizes != (1, 2, 64)


def test_slack_keeps_the_weight(costs: CostTable) -> None:
    seen = window(costs, 1, 2)
    assert with_slack(seen, everywhere(costs), 0.3).total_weight == pytest.approx(seen.total_weight)


def test_a_single_window_tells_nothing_of_drift(costs: CostTable) -> None:
    slack = choose_slack([window(costs, 1)], everywhere(costs), three_graphs, True)
    assert slack.share == 0.0 and slack.worst_regret is None
