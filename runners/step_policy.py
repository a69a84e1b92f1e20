"""Decides how a decode batch runs, and keeps account of how the steps did run."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from runners.errors import NoUsableGraphError, RunnerError
from runners.padding import StepCosts, StepOutcome, StepPlan, create_strategy, greedy_sizes, split_sizes

AboveMax = Literal["eager", "split", "error"]
OnMiss = Literal["eager", "error"]

#: Reasons that are warned about: why, and what to do.
_EXPLANATIONS = {
    "above_max": (
        "it is above the largest capture size, {max_bs}",
        "Raise capture.max_size or extend capture.sizes, or choose another runner.above_max: eager, split or error.",
    ),
    "not_captured": (
        "padding={padding} finds no captured size for it within the largest, {max_bs}",
        "Capture that size, set padding=nearest, or set runner.on_miss=error to refuse such steps.",
    ),
    "plan_layout": (
        "its attention plan differs in layout from the captured one (largest size {max_bs})",
        "Capture with the lengths of the workload, or set runner.on_miss=error to refuse such steps.",
    ),
}


class StepPolicy:
    """Batch size → plan, under a padding strategy and the two policies for batches without a graph.

    `above_max` decides, alone, for batches above the largest capture size; `on_miss` for batches
    within range for which the strategy finds no captured size. With the graph backend `inductor` a
    step runs `compiled` where it would else replay a graph of ours.
    """

    def __init__(
        self,
        capture_bs: Sequence[int],
        *,
        padding: str,
        above_max: AboveMax,
        on_miss: OnMiss,
        graph_backend: str,
        compile_bs: Sequence[int] = (),
    ) -> None:
        self.capture_bs = sorted(capture_bs)
        self.compile_bs = list(compile_bs)
        #: Steps for which the strategy finds a size run compiled, without a graph of ours.
        self._runs_inductor = graph_backend == "inductor"
        self.max_bs = self.capture_bs[-1]
        self.padding = padding
        self.above_max = above_max
        self.on_miss = on_miss
        self._graph_backend = graph_backend
        #: The last plan that was forced, for which batch size, and what came of it.
        self._last_forced: tuple[int, StepPlan, StepPlan] | None = None
        self.set_costs(None)

    def set_costs(self, costs: StepCosts | None) -> None:
        """Use measured costs from now on, or none. Raises RunnerError for those of another backend."""
        if costs is not None and costs.graph_backend not in (None, self._graph_backend):
            raise RunnerError(
                f"the step costs were measured on {costs.graph_backend} graphs, but this runner's are "
                f"{self._graph_backend}: measure them here, or leave padding.costs_path empty."
            )
        self._costs = costs or StepCosts()
        self._strategy = create_strategy(self.padding, self.capture_bs, self._costs)
        # A step looks its plan up; a strategy may need a dynamic program to find it.
        self._plans: dict[int, StepPlan] = {}

    def plan(self, batch_size: int) -> StepPlan:
        """Return the plan for a batch. Raises NoUsableGraphError where the policy is `error`."""
        plan = self._plans.get(batch_size)
        if plan is None:
            plan = self._choose(batch_size)
            if self._runs_inductor and plan.mode == "graph":
                plan = StepPlan("compiled", plan.sizes, plan.reason)
            self._plans[batch_size] = plan
        return plan

    def refuses(self, batch_size: int) -> bool:
        """Return True if such a batch is an error under `above_max` or `on_miss`."""
        try:
            self.plan(batch_size)
        except NoUsableGraphError:
            return True
        return False

    def _choose(self, batch_size: int) -> StepPlan:
        if batch_size == 0:
            return StepPlan("graph", tuple(self.capture_bs[:1]), "idle")
        if batch_size > self.max_bs:
            return self._choose_above_max(batch_size)
        plan = self._strategy.plan(batch_size)
        if plan is None and self.on_miss == "error":
            raise NoUsableGraphError(self.explain(batch_size, "not_captured", "is refused"))
        return plan or StepPlan("eager", (), "not_captured")

    def _choose_above_max(self, batch_size: int) -> StepPlan:
        if self.above_max == "error":
            raise NoUsableGraphError(self.explain(batch_size, "above_max", "is refused"))
        if self.above_max == "eager":
            return StepPlan("eager", (), "above_max")
        sizes = split_sizes(batch_size, self.capture_bs, self._costs)
        return StepPlan("split", sizes or greedy_sizes(batch_size, self.capture_bs), "above_max")

    def check_forced(self, batch_size: int, plan: StepPlan) -> StepPlan:
        """Return the caller's `plan` with a reason. Raises RunnerError if the batch cannot run so.

        Eager, padded to a size whose graph is compiled, means the compiled function without the graph,
        which is what a replay must equal: mode `compiled`.
        """
        last = self._last_forced
        if last is None or last[1] is not plan or last[0] != batch_size:
            # One plan comes again and again: with cold caches to check it takes longer than all the rest.
            self._last_forced = last = batch_size, plan, self._checked(batch_size, plan)
        return last[2]

    def _checked(self, batch_size: int, plan: StepPlan) -> StepPlan:
        sizes, wanted = plan.sizes, f"the forced plan {plan.mode}{plan.sizes} for a batch of {batch_size}"
        self._check_sizes(plan, wanted)
        # Every part must get a request, or the sizes say more graphs than the step needs.
        fits = sum(sizes[:-1]) < max(batch_size, 1) and batch_size <= sum(sizes)
        possible = {
            "graph": len(sizes) == 1 and fits,
            "split": len(sizes) >= 1 and fits,
            "compiled": len(sizes) == 1 and fits,
            "eager": not sizes or (len(sizes) == 1 and fits),
        }
        if not possible[plan.mode]:
            raise RunnerError(
                f"{wanted} is impossible: the sizes must hold the batch, with at least one request in each."
            )
        runs_compiled = self.runs_compiled(plan) and not plan.num_graphs
        return StepPlan("compiled" if runs_compiled else plan.mode, sizes, plan.reason or "forced")

    def _check_sizes(self, plan: StepPlan, wanted: str) -> None:
        if plan.mode == "eager":
            return
        what, usable = "captured", [] if self._runs_inductor else self.capture_bs
        if plan.mode == "compiled":
            what, usable = "compiled", self.compile_bs
        missing = [size for size in plan.sizes if size not in usable]
        if missing:
            raise RunnerError(f"{wanted}: sizes {missing} are not {what}, only {usable}.")

    def runs_compiled(self, plan: StepPlan) -> bool:
        """Return True if each part of a step that runs as `plan` runs compiled code."""
        if self._runs_inductor:
            return plan.mode == "compiled"
        return bool(plan.sizes) and all(size in self.compile_bs for size in plan.sizes)

    def explain(self, batch_size: int, reason: str, what: str) -> str:
        """Say in one message what happens to a batch, why, and what would change it."""
        why, remedy = _EXPLANATIONS[reason]
        why = why.format(max_bs=self.max_bs, padding=self.padding)
        return f"a decode batch of {batch_size} {what}: {why}. {remedy}"


class StepLog:
    """How the steps ran: the last one, the counts, and one warning per reason that deserves it."""

    def __init__(self, policy: StepPolicy) -> None:
        self._policy = policy
        self.outcome: StepOutcome | None = None
        #: (mode, reason) → steps.
        self.counts: Counter[tuple[str, str]] = Counter()
        #: Reason → its warning.
        self.warnings: dict[str, str] = {}

    def add(self, batch_size: int, plan: StepPlan, prepare_ns: int) -> None:
        """Count a step that ran as `plan` says."""
        self.outcome = StepOutcome(
            mode=plan.mode,
            reason=plan.reason,
            batch_size=batch_size,
            padded_batch_size=plan.padded_batch_size(batch_size),
            num_graphs=plan.num_graphs,
            host_prepare_us=prepare_ns / 1e3,
            sizes=plan.sizes,
        )
        self.counts[plan.mode, plan.reason] += 1
        if plan.reason in _EXPLANATIONS and plan.reason not in self.warnings:
            message = self._policy.explain(batch_size, plan.reason, f"runs {plan.mode}")
            self.warnings[plan.reason] = message
            warnings.warn(f"{message} Further such steps are only counted.", RuntimeWarning, stacklevel=4)
