"""What a step costs by a recorded run's tables, for `workload.clock=costs`."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from harness.errors import ConfigError
from runners.padding import StepCosts

if TYPE_CHECKING:
    from harness.scheduler import ScheduledStep
    from harness.scheduler_loop import StepResult


def load_step_cost(path: str | Path) -> Callable[[ScheduledStep, StepResult], float]:
    """Return a function from a step and how it ran to its time in ms.

    Decode steps cost what `sizes.csv` says of their padded size and mode, prefill steps what the
    `prefill.csv` beside it says of their tokens; linear between measured neighbours, and the end
    value beyond them. Raises ConfigError if a mode that ran has no measured time.
    """
    costs = StepCosts.from_sizes_csv(path)
    prefill_ms = _read_prefill(Path(path).with_name("prefill.csv"))

    def cost_ms(step: ScheduledStep, result: StepResult) -> float:
        if step.phase == "prefill":
            return _at(prefill_ms, step.num_tokens, path, "prefill (measure.prefill_tokens)")
        if result.mode == "eager":
            return _at(sorted(costs.eager_ms.items()), result.padded_batch_size, path, "eager")
        graphs = sorted(costs.graph_ms.items())
        rows = result.padded_batch_size / result.num_graphs
        return result.num_graphs * _at(graphs, rows, path, "graph")

    return cost_ms


def _read_prefill(path: Path) -> list[tuple[int, float]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = [
            (int(r["num_tokens"]), float(r["step_ms_p50"])) for r in csv.DictReader(file) if r["step_ms_p50"]
        ]
    return sorted(rows)


def _at(points: Sequence[tuple[int, float]], where: float, path: str | Path, what: str) -> float:
    if not points:
        raise ConfigError(
            "workload.costs_path", path, f"has no measured {what} step; give a run that measured one"
        )
    sizes, times = zip(*points, strict=True)
    return float(np.interp(where, sizes, times))
