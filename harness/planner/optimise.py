"""The best capture list under a budget, by exact dynamic programming.

Without limits on memory or time, the best list of at most `g` sizes that ends at candidate `j` is the
best of at most `g - 1` sizes that ends at some `i < j`, and the batches between them on `j`: `O(n²)` a
graph, vectorised. With them, see `constrained.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from harness.errors import ConfigError
from harness.planner.constrained import search, shortest_path

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.planner.problem import CaptureProblem

_MIB = 1024**2


@dataclass(frozen=True)
class Budget:
    """What a list may take at most; None: no limit."""

    max_graphs: int | None = None
    memory_mib: float | None = None
    capture_seconds: float | None = None

    @property
    def is_unlimited(self) -> bool:
        return self.max_graphs is None and self.memory_mib is None and self.capture_seconds is None


@dataclass(frozen=True)
class CaptureChoice:
    """A capture list and what it costs for the problem's batches."""

    sizes: tuple[int, ...]
    #: Mean time of a decode step in ms, without the host's time between steps.
    step_ms: float
    device_bytes: float
    seconds: float
    #: How far above the proven lower bound it may lie, as a fraction; 0: it is the best list.
    gap: float = 0.0

    @property
    def num_graphs(self) -> int:
        return len(self.sizes)


def optimise(problem: CaptureProblem, budget: Budget | None = None) -> CaptureChoice:
    """Return the list with the lowest mean step time within `budget`, the fewest graphs among equals.

    Raises ConfigError if not even the graph of the largest batch alone fits.
    """
    budget = budget or Budget()
    _check_feasible(problem, budget)
    fastest = _choice(problem, shortest_path(problem.open_arcs_ms))
    if _fits(fastest, budget):
        return fastest
    front = pareto_front(problem, _most_graphs(problem, budget))
    if budget.memory_mib is None and budget.capture_seconds is None:
        return front[-1]
    incumbent = min((choice for choice in front if _fits(choice, budget)), key=lambda choice: choice.step_ms)
    resources, limits = _limited(problem, budget)
    arc_ms = problem.open_arcs_ms / problem.total_weight
    start = [problem.sizes.index(size) for size in incumbent.sizes]
    indices, gap = search(arc_ms, resources, limits, start)
    return _choice(problem, indices, gap)


def pareto_front(
    problem: CaptureProblem, max_graphs: int | None = None, enough_ms: float = 0.0
) -> list[CaptureChoice]:
    """Return the best list for each number of graphs that improves on fewer.

    The last one has `max_graphs` at most, or is the first whose mean step time is at most `enough_ms`, or
    is the best of all.
    """
    arcs_ms = problem.open_arcs_ms
    arcs, best_ms = np.ascontiguousarray(arcs_ms[:, 1:]), arcs_ms[:, 0].copy()
    #: Per number of graphs: the index before `j` on the best path to it; -1: none; -2: as with fewer graphs.
    before = [np.full(len(best_ms), -1)]
    front = [_choice(problem, [len(best_ms) - 1])]
    while (max_graphs is None or len(before) < max_graphs) and front[-1].step_ms > enough_ms:
        paths_ms = best_ms[None, :] + arcs
        index = np.argmin(paths_ms, axis=1)
        reached_ms = paths_ms[np.arange(len(index)), index]
        improves = reached_ms < best_ms
        if not improves.any():  # nor would any larger number of graphs
            break
        before.append(np.where(improves, index, -2))
        best_ms = np.where(improves, reached_ms, best_ms)
        if improves[-1]:
            front.append(_choice(problem, _path(before)))
    return front


def _path(before: list[NDArray[np.int64]]) -> list[int]:
    level, index = len(before) - 1, len(before[0]) - 1
    path = [index]
    while True:
        previous = int(before[level][index])
        if previous == -1:
            return path[::-1]
        level -= 1
        if previous >= 0:
            index = previous
            path.append(index)


def _choice(problem: CaptureProblem, indices: list[int], gap: float = 0.0) -> CaptureChoice:
    sizes = tuple(problem.sizes[index] for index in indices)
    return CaptureChoice(
        sizes,
        problem.list_ms(sizes),
        float(problem.device_bytes[indices].sum()),
        float(problem.seconds[indices].sum()),
        gap,
    )


def _fits(choice: CaptureChoice, budget: Budget) -> bool:
    return (
        (budget.max_graphs is None or choice.num_graphs <= budget.max_graphs)
        and (budget.memory_mib is None or choice.device_bytes <= budget.memory_mib * _MIB)
        and (budget.capture_seconds is None or choice.seconds <= budget.capture_seconds)
    )


def _most_graphs(problem: CaptureProblem, budget: Budget) -> int:
    """As many graphs as any list within the budget can have: the largest and the cheapest others."""
    most = budget.max_graphs or len(problem.sizes)
    limits = (
        (problem.device_bytes, None if budget.memory_mib is None else budget.memory_mib * _MIB),
        (problem.seconds, budget.capture_seconds),
    )
    for taken, limit in limits:
        if limit is not None:
            at_least = taken[-1] + np.concatenate([[0.0], np.cumsum(np.sort(taken[:-1]))])
            most = min(most, int(np.searchsorted(at_least, limit, side="right")))
    return max(most, 1)


def _limited(problem: CaptureProblem, budget: Budget) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """`[num_resources, n]` what each candidate takes, as a share of the limit; and the limits, all 1."""
    rows = []
    if budget.max_graphs is not None:
        rows.append(np.full(len(problem.sizes), 1 / budget.max_graphs))
    if budget.memory_mib is not None:
        rows.append(problem.device_bytes / (budget.memory_mib * _MIB))
    if budget.capture_seconds is not None:
        rows.append(problem.seconds / budget.capture_seconds)
    return np.array(rows), np.ones(len(rows))


def _check_feasible(problem: CaptureProblem, budget: Budget) -> None:
    """The graph of the largest batch is always captured, so it must fit."""
    largest, needed = problem.sizes[-1], problem.device_bytes[-1] / _MIB
    if budget.max_graphs is not None and budget.max_graphs < 1:
        raise ConfigError(
            "--max-graphs", budget.max_graphs, "at least one graph is captured: write 1 or more"
        )
    if budget.memory_mib is not None and needed > budget.memory_mib:
        raise ConfigError(
            "--memory-mib",
            budget.memory_mib,
            f"the graph of the largest batch ({largest}) alone takes {needed:.0f} MiB: raise it",
        )
    if budget.capture_seconds is not None and problem.seconds[-1] > budget.capture_seconds:
        raise ConfigError(
            "--capture-seconds",
            budget.capture_seconds,
            f"capturing the largest batch ({largest}) alone takes {problem.seconds[-1]:.2f} s: raise it",
        )
