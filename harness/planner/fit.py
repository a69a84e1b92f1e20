"""The list for a traffic: the fixed point of choosing a list and simulating what it does to the batches.

The list changes the step time, the step time changes the batches, and the batches change the list. So a
list is chosen for the batches under the list before, until it comes out as it went in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from harness.planner.drift import Slack, choose_slack, with_slack
from harness.planner.histogram import BatchHistogram, spread
from harness.planner.honesty import WindowTimes
from harness.planner.problem import CaptureProblem, capture_problem

if TYPE_CHECKING:
    from harness.planner.cost import CostTable
    from harness.planner.optimise import CaptureChoice
    from harness.planner.traffic import Traffic

_MAX_ROUNDS = 8
#: Groups of windows that are left out in turn to choose the slack.
_NUM_FOLDS = 5


@dataclass(frozen=True)
class Fit:
    """A list that was chosen, and on what."""

    choice: CaptureChoice
    problem: CaptureProblem
    slack: Slack
    #: Lists tried until the fixed point; whether it was reached.
    rounds: list[tuple[int, ...]]
    converged: bool


class Fitter:
    """Fits lists on the first `num_windows` windows of one traffic.

    Args:
        candidates: sizes that may be chosen.
        compared: sizes that are priced too, but not chosen.
        on_progress: told in a word what is simulated next.
    """

    def __init__(
        self,
        costs: CostTable,
        traffic: Traffic,
        num_windows: int,
        candidates: Sequence[int],
        compared: Sequence[int],
        padding: str,
        on_progress: Callable[[str], object],
    ) -> None:
        self._costs, self._traffic, self._num_windows = costs, traffic, num_windows
        self._candidates, self._compared, self._padding = candidates, compared, padding
        self._on_progress = on_progress

    def fit(
        self,
        start: tuple[int, ...],
        choose: Callable[[CaptureProblem], CaptureChoice],
        prefers_few_graphs: bool,
    ) -> Fit:
        """Choose for the batches under the list before, `start` first, until the list repeats.

        If it comes back to an earlier list other than the last one, the fastest of the cycle is taken.
        """
        even = self._spread(start)
        folds = [self.problem(start, slice(*fold)) for fold in _folds(self._num_windows, _NUM_FOLDS)]
        slack = choose_slack(folds, even, choose, prefers_few_graphs)
        rounds = [start]
        found: dict[tuple[int, ...], tuple[CaptureChoice, CaptureProblem]] = {}
        while True:
            problem = self.problem(rounds[-1], slice(0, self._num_windows))
            # Without a step to fit on, every batch is as likely as another.
            problem = with_slack(problem, even, slack.share) if problem.total_weight else even
            choice = choose(problem)
            if choice.sizes == rounds[-1]:
                return Fit(choice, problem, slack, rounds, True)
            if choice.sizes in found or len(rounds) > _MAX_ROUNDS or not self._traffic.has_feedback:
                break
            found[choice.sizes] = choice, problem
            rounds.append(choice.sizes)
        found[choice.sizes] = choice, problem
        best = min(found, key=lambda sizes: self._fitted_ms(sizes) or 0.0)
        return Fit(*found[best], slack, rounds, not self._traffic.has_feedback)

    def histogram(self, sizes: Sequence[int], windows: slice) -> BatchHistogram:
        """The decode batches of some windows when `sizes` are captured."""
        self._on_progress(f"{len(sizes)} graphs")
        traffic = self._traffic.under(sizes)
        excess = None if traffic.excess_tokens is None else traffic.excess_tokens[windows].sum(axis=0)
        return BatchHistogram.from_counts(traffic.histogram[windows].sum(axis=0), self._traffic.grid, excess)

    def problem(self, sizes: Sequence[int], windows: slice) -> CaptureProblem:
        """The choice of a list for those batches."""
        return self._price(self.histogram(sizes, windows))

    def _spread(self, start: tuple[int, ...]) -> CaptureProblem:
        context = self.histogram(start, slice(0, self._num_windows)).mean_context
        return self._price(spread(self._traffic.max_batch_size, context))

    def _price(self, histogram: BatchHistogram) -> CaptureProblem:
        return capture_problem(self._costs, histogram, self._candidates, self._padding, self._compared)

    def _fitted_ms(self, sizes: tuple[int, ...]) -> float | None:
        times = WindowTimes.of(self._costs, self._traffic.under(sizes))
        return times.step_ms(slice(0, self._num_windows))


def _folds(num_windows: int, num_folds: int) -> list[tuple[int, int]]:
    bounds = [round(num_windows * fold / num_folds) for fold in range(num_folds + 1)]
    return [(start, end) for start, end in pairwise(bounds) if end > start]
