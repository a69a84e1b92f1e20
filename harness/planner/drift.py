"""Slack for traffic that drifts: how much of the weight goes to batches that the past did not show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.planner.optimise import Budget, optimise
from harness.planner.problem import mix

if TYPE_CHECKING:
    from harness.planner.optimise import CaptureChoice
    from harness.planner.problem import CaptureProblem

#: Shares of the weight that are tried.
SLACKS = (0.0, 0.003, 0.01, 0.03, 0.1)
#: Slacks whose worst regrets differ by no more than this are equal: less is noise.
_RESOLUTION = 1e-4


@dataclass(frozen=True)
class Slack:
    """The slack chosen, and what it costs in the worst window when that window is left out of the fit."""

    share: float
    #: Mean step time above that of the best list of as many graphs for the window itself, as a fraction.
    worst_regret: float | None
    #: The same for every slack tried.
    tried: dict[float, float]


def with_slack(problem: CaptureProblem, spread: CaptureProblem, share: float) -> CaptureProblem:
    """Move the share `share` of a problem's weight to the batches of `spread` (of total weight 1)."""
    return mix([problem, spread], [1 - share, share * problem.total_weight])


def choose_slack(
    windows: Sequence[CaptureProblem],
    spread: CaptureProblem,
    choose: Callable[[CaptureProblem], CaptureChoice],
    prefers_few_graphs: bool,
) -> Slack:
    """Return the slack whose worst window, of those left out in turn, regrets least.

    Each window is left out once; a list is chosen on the others with each slack, and its step time in
    the window left out is compared with that of the best list of as many graphs for that window.
    Slack asks for graphs where the windows show no batches. So of equals the smallest is taken if few
    graphs are wanted. Within a budget graphs are free, and the windows show no drift beyond the time that
    they span: there the largest is taken.
    """
    windows = [window for window in windows if window.total_weight]
    if len(windows) < 2:
        return Slack(0.0, None, {})
    tried = {share: max(_regrets(windows, spread, share, choose)) for share in SLACKS}
    enough = min(tried.values()) + _RESOLUTION
    equals = [share for share, regret in tried.items() if regret <= enough]
    best = min(equals) if prefers_few_graphs else max(equals)
    return Slack(best, tried[best], tried)


def _regrets(
    windows: Sequence[CaptureProblem],
    spread: CaptureProblem,
    share: float,
    choose: Callable[[CaptureProblem], CaptureChoice],
) -> list[float]:
    regrets = []
    for left_out, window in enumerate(windows):
        weights = [float(index != left_out) for index in range(len(windows))]
        chosen = choose(with_slack(mix(windows, weights), spread, share))
        best = optimise(window, Budget(max_graphs=chosen.num_graphs))
        regrets.append(window.list_ms(chosen.sizes) / best.step_ms - 1)
    return regrets
