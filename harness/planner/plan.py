"""The plan for a traffic: the fixed point of choosing a list and simulating what it does to the batches.

The list changes the step time, the step time changes the batches, and the batches change the list. So a
list is chosen for the batches under the list before, until it comes out as it went in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from harness.planner.drift import Slack, choose_slack, with_slack
from harness.planner.histogram import BatchHistogram, spread
from harness.planner.honesty import Comparison, WindowTimes, compare
from harness.planner.lists import NamedList, engine_lists
from harness.planner.optimise import Budget, CaptureChoice, optimise, pareto_front
from harness.planner.problem import CaptureProblem, capture_problem

if TYPE_CHECKING:
    from harness.planner.cost import CostTable
    from harness.planner.traffic import ListTraffic, Traffic

#: Without a budget: the fewest graphs that no engine's own list beats on the fitted part, and whose step
#: time is within this of what all candidates would give.
_TOLERANCE = 0.005
_ROUNDING = 1e-9
_MAX_ROUNDS = 8
#: Graphs up to which the front is shown; an engine's list is rarely twice as long.
_MAX_FRONT = 64
#: Groups of windows that are left out in turn to choose the slack.
_NUM_FOLDS = 5


@dataclass(frozen=True)
class Judged:
    """A list on the windows that the plan was not fitted on."""

    name: str
    sizes: tuple[int, ...]
    #: Mean decode step time in ms, host time between steps included; None if no step ran there.
    step_ms: float | None
    device_bytes: float
    seconds: float
    #: The plan against this list; None for the plan itself.
    against: Comparison | None
    traffic: ListTraffic


@dataclass(frozen=True)
class HalfSize:
    """An engine's list beside the best one of at most half its graphs."""

    engine: Judged
    half: Judged
    comparison: Comparison | None


@dataclass(frozen=True)
class Plan:
    """What was chosen, why, and how sure it is."""

    choice: CaptureChoice
    budget: Budget
    padding: str
    #: The best list for each number of graphs, on the fitted part.
    front: list[CaptureChoice]
    plan: Judged
    default: Judged
    engines: list[Judged]
    halves: list[HalfSize]
    #: The best list of as many graphs, had the judged part been known.
    hindsight_step_ms: float | None
    slack: Slack
    #: Lists tried until the fixed point; whether it was reached.
    rounds: list[tuple[int, ...]]
    converged: bool
    #: The histogram that the plan was fitted on.
    fitted: BatchHistogram
    fit_share: float
    warnings: list[str] = field(default_factory=list)

    @property
    def is_recommended(self) -> bool:
        """False: keep the default, for the interval of the gain includes zero (or there is none)."""
        comparison = self.default.against
        return comparison is not None and comparison.is_better


class Planner:
    """Makes a plan for one traffic on one cost table.

    Args:
        default: the list in use today, which the plan must beat.
        fit_share: the part of the windows, from the start, on which the list is chosen; it is judged on
            the others.
        on_progress: told in a word what is simulated next.
    """

    def __init__(
        self,
        costs: CostTable,
        traffic: Traffic,
        candidates: Sequence[int],
        default: NamedList,
        budget: Budget | None = None,
        padding: str = "nearest",
        fit_share: float = 0.5,
        on_progress: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._costs, self._traffic = costs, traffic
        self._candidates, self._default = candidates, default
        self._budget, self._padding = budget or Budget(), padding
        self._fit_share = fit_share
        self._on_progress = on_progress
        self._num_fit = max(1, round(traffic.num_windows * fit_share))
        self._engines = [e for e in engine_lists(traffic.max_batch_size) if self._can_run(e.sizes)]
        compared = {size for engine in [*self._engines, default] for size in engine.sizes}
        if padding == "cheapest":  # which takes measured sizes only
            compared &= set(costs.step_costs.graph_ms)
        self._compared = sorted(compared)

    def plan(self) -> Plan:
        """Choose, judge and compare."""
        slack = self._choose_slack()
        choice, problem, rounds, converged = self._fixed_point(slack)
        plan = self._judge("plan", choice.sizes)
        default = self._judge(self._default.name, self._default.sizes, against=plan)
        engines = [self._judge(engine.name, engine.sizes, against=plan) for engine in self._engines]
        front = pareto_front(problem, max(_MAX_FRONT, choice.num_graphs))
        return Plan(
            choice=choice,
            budget=self._budget,
            padding=self._padding,
            front=front,
            plan=plan,
            default=default,
            engines=engines,
            halves=[self._halve(engine, front) for engine in engines if len(engine.sizes) > 1],
            hindsight_step_ms=self._hindsight(choice),
            slack=slack,
            rounds=rounds,
            converged=converged,
            fitted=self._histogram(choice.sizes, slice(0, self._num_fit)),
            fit_share=self._fit_share,
        )

    def _choose_slack(self) -> Slack:
        windows = [
            self._problem(self._default.sizes, slice(start, end))
            for start, end in _folds(self._num_fit, _NUM_FOLDS)
        ]
        return choose_slack(windows, self._spread, self._choose)

    def _fixed_point(self, slack: Slack) -> tuple[CaptureChoice, CaptureProblem, list[tuple[int, ...]], bool]:
        """Choose for the batches under the list before, until the list repeats.

        If it comes back to an earlier list other than the last one, the fastest of the cycle is taken.
        """
        rounds = [self._default.sizes]
        found: dict[tuple[int, ...], tuple[CaptureChoice, CaptureProblem]] = {}
        while True:
            problem = self._problem(rounds[-1], slice(0, self._num_fit))
            # Without a step to fit on, every batch is as likely as another.
            problem = with_slack(problem, self._spread, slack.share) if problem.total_weight else self._spread
            choice = self._choose(problem)
            if choice.sizes == rounds[-1]:
                return choice, problem, rounds, True
            if choice.sizes in found or len(rounds) > _MAX_ROUNDS or not self._traffic.has_feedback:
                break
            found[choice.sizes] = choice, problem
            rounds.append(choice.sizes)
        found[choice.sizes] = choice, problem
        best = min(found, key=lambda sizes: self._fitted_ms(sizes) or 0.0)
        return *found[best], rounds, not self._traffic.has_feedback

    def _choose(self, problem: CaptureProblem) -> CaptureChoice:
        if not self._budget.is_unlimited:
            return optimise(problem, self._budget)
        rivals = [engine.sizes for engine in self._engines if set(engine.sizes) <= set(problem.sizes)]
        rivals = [sizes for sizes in rivals if max(sizes) == problem.sizes[-1]]
        enough_ms = min(problem.list_ms(sizes) for sizes in [self._default.sizes, *rivals])
        enough_ms = min(enough_ms, optimise(problem).step_ms * (1 + _TOLERANCE)) * (1 + _ROUNDING)
        return pareto_front(problem, enough_ms=enough_ms)[-1]

    def _judge(self, name: str, sizes: tuple[int, ...], against: Judged | None = None) -> Judged:
        self._on_progress(name)
        traffic = self._traffic.under(sizes)
        times = WindowTimes.of(self._costs, traffic)
        comparison = None
        if against is not None:
            plan_times = WindowTimes.of(self._costs, against.traffic)
            comparison = compare(plan_times, times, self._held_out)
        captures = self._costs.captures
        return Judged(
            name,
            sizes,
            times.step_ms(self._held_out),
            float(captures.device_bytes(sizes).sum()),
            float(captures.seconds(sizes).sum()),
            comparison,
            traffic,
        )

    def _halve(self, engine: Judged, front: list[CaptureChoice]) -> HalfSize:
        half = [choice for choice in front if choice.num_graphs <= len(engine.sizes) // 2][-1]
        judged = self._judge(f"best {half.num_graphs}", half.sizes)
        half_times, engine_times = (WindowTimes.of(self._costs, side.traffic) for side in (judged, engine))
        return HalfSize(engine, judged, compare(half_times, engine_times, self._held_out))

    def _hindsight(self, choice: CaptureChoice) -> float | None:
        problem = self._problem(choice.sizes, self._held_out)
        if not problem.total_weight:
            return None
        best = optimise(problem, Budget(max_graphs=choice.num_graphs))
        return WindowTimes.of(self._costs, self._traffic.under(best.sizes)).step_ms(self._held_out)

    @property
    def _held_out(self) -> slice:
        return slice(self._num_fit, None)

    def _fitted_ms(self, sizes: tuple[int, ...]) -> float | None:
        return WindowTimes.of(self._costs, self._traffic.under(sizes)).step_ms(slice(0, self._num_fit))

    def _histogram(self, sizes: Sequence[int], windows: slice) -> BatchHistogram:
        self._on_progress(f"{len(sizes)} graphs")
        traffic = self._traffic.under(sizes)
        excess = None if traffic.excess_tokens is None else traffic.excess_tokens[windows].sum(axis=0)
        return BatchHistogram.from_counts(traffic.histogram[windows].sum(axis=0), self._traffic.grid, excess)

    def _problem(self, sizes: Sequence[int], windows: slice) -> CaptureProblem:
        return self._price(self._histogram(sizes, windows))

    def _price(self, histogram: BatchHistogram) -> CaptureProblem:
        return capture_problem(self._costs, histogram, self._candidates, self._padding, self._compared)

    @cached_property
    def _spread(self) -> CaptureProblem:
        context = self._histogram(self._default.sizes, slice(0, self._num_fit)).mean_context
        return self._price(spread(self._traffic.max_batch_size, context))

    def _can_run(self, sizes: Sequence[int]) -> bool:
        """Whether every graph of the list, and eager where it leaves a gap, was measured."""
        graph, eager = self._costs.graph, self._costs.eager
        gap = range(max(sizes) + 1, self._traffic.max_batch_size + 1)
        return all(graph.covers(size) for size in sizes) and all(eager.covers(size) for size in gap)


def _folds(num_windows: int, num_folds: int) -> list[tuple[int, int]]:
    bounds = [round(num_windows * fold / num_folds) for fold in range(num_folds + 1)]
    return [(start, end) for start, end in pairwise(bounds) if end > start]
