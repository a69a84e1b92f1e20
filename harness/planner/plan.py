"""The plan for a traffic: a list fitted on its first part, judged on the rest beside every engine's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from harness.planner.fit import Fitter
from harness.planner.halves import HalfSize, half_of
from harness.planner.honesty import Comparison, WindowTimes, compare
from harness.planner.lists import NamedList, engine_lists
from harness.planner.optimise import Budget, CaptureChoice, optimise, pareto_front

if TYPE_CHECKING:
    from harness.planner.cost import CostTable
    from harness.planner.drift import Slack
    from harness.planner.histogram import BatchHistogram
    from harness.planner.problem import CaptureProblem
    from harness.planner.traffic import ListTraffic, Traffic

#: Without a budget: the fewest graphs that no engine's own list beats on the fitted part, and whose step
#: time is within this of what all candidates would give.
_TOLERANCE = 0.005
_ROUNDING = 1e-9
#: Graphs up to which the front is shown; an engine's list is rarely twice as long.
_MAX_FRONT = 64


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
        self._default, self._budget, self._fit_share = default, budget or Budget(), fit_share
        self._padding, self._on_progress = padding, on_progress
        self._num_fit = max(1, round(traffic.num_windows * fit_share))
        self._engines = [e for e in engine_lists(traffic.max_batch_size) if self._can_run(e.sizes)]
        compared = {size for engine in [*self._engines, default] for size in engine.sizes}
        if padding == "cheapest":  # which takes measured sizes only
            compared &= set(costs.step_costs.graph_ms)
        self._fitter = Fitter(
            costs, traffic, self._num_fit, candidates, sorted(compared), padding, on_progress
        )

    def plan(self) -> Plan:
        """Choose, judge and compare."""
        fit = self._fitter.fit(self._default.sizes, self._choose, self._budget.is_unlimited)
        choice = fit.choice
        plan = self._judge("plan", choice.sizes)
        default = self._judge(self._default.name, self._default.sizes, against=plan)
        engines = [self._judge(engine.name, engine.sizes, against=plan) for engine in self._engines]
        in_use = {row.name: row for row in (default, *engines)}
        return Plan(
            choice=choice,
            budget=self._budget,
            padding=self._padding,
            front=pareto_front(fit.problem, max(_MAX_FRONT, choice.num_graphs)),
            plan=plan,
            default=default,
            engines=engines,
            halves=[self._halve(engine) for engine in in_use.values()],
            hindsight_step_ms=self._hindsight_ms(plan, Budget(choice.num_graphs)),
            slack=fit.slack,
            rounds=fit.rounds,
            converged=fit.converged,
            fitted=self._fitter.histogram(choice.sizes, slice(0, self._num_fit)),
            fit_share=self._fit_share,
        )

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

    def _halve(self, engine: Judged) -> HalfSize:
        """Plan as if the engine's list were the default, with at most half of its graphs."""
        most = min(half_of(engine.sizes), self._budget.max_graphs or len(engine.sizes))
        budget = replace(self._budget, max_graphs=most)
        fit = self._fitter.fit(engine.sizes, lambda problem: optimise(problem, budget), False)
        half = self._judge(f"best {fit.choice.num_graphs}", fit.choice.sizes)
        half_times, engine_times = (WindowTimes.of(self._costs, side.traffic) for side in (half, engine))
        comparison = compare(half_times, engine_times, self._held_out)
        return HalfSize(engine, half, comparison, self._hindsight_ms(half, budget))

    def _hindsight_ms(self, fitted: Judged, budget: Budget) -> float | None:
        """The step time of the best list, had the judged windows been known; None without a step there.

        It is chosen for their batches under the fitted list, so feedback may leave that one the faster.
        """
        problem = self._fitter.problem(fitted.sizes, self._held_out)
        if not problem.total_weight or fitted.step_ms is None:
            return None
        best = self._traffic.under(optimise(problem, budget).sizes)
        best_ms = WindowTimes.of(self._costs, best).step_ms(self._held_out)
        return fitted.step_ms if best_ms is None else min(best_ms, fitted.step_ms)

    @property
    def _held_out(self) -> slice:
        return slice(self._num_fit, None)

    def _can_run(self, sizes: Sequence[int]) -> bool:
        """Whether every graph of the list, and eager where it leaves a gap, was measured."""
        graph, eager = self._costs.graph, self._costs.eager
        gap = range(max(sizes) + 1, self._traffic.max_batch_size + 1)
        return all(graph.covers(size) for size in sizes) and all(eager.covers(size) for size in gap)
