"""What the known times of steps say of a workload's batches before it runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import ConfigError
from harness.record import STREAMS
from harness.step_times import CostTable, FixedTimes, StepTimes
from harness.workload.stable_batch import stable_batches
from runners.errors import NoUsableGraphError
from runners.padding import StepPlan

if TYPE_CHECKING:
    from harness.schema import Config, WorkloadConfig
    from harness.workload.base import Workload
    from runners.model_runner import ModelRunner


def clock_times(workload: WorkloadConfig) -> StepTimes | None:
    """Return the times that the workload's clock charges; None for the one that measures them."""
    if workload.clock == "fixed":
        assert workload.fixed_step_ms is not None, "check_clock asks for it"
        return FixedTimes(workload.fixed_step_ms, workload.fixed_eager_step_ms)
    if workload.clock == "costs":
        assert workload.costs_path is not None, "check_clock asks for it"
        return CostTable.load(workload.costs_path)
    return None


def forecast_batches(runner: ModelRunner, workload: Workload, config: Config, job_dir: Path) -> list[float]:
    """Return the batch sizes at which the load can stay, by the clock's times or this run's size sweep.

    Empty if there are none, or none for a step that the workload needs.
    """
    times = clock_times(config.workload)
    if times is None and config.measure.enabled:
        times = CostTable.load(job_dir / STREAMS["sizes"].file_name)
    if times is None:
        return []
    try:
        return _stable_batches(runner, workload, times)
    except ConfigError:  # every sample of a point was discarded
        return []


def _stable_batches(runner: ModelRunner, workload: Workload, times: StepTimes) -> list[float]:
    prompt_len = float(workload.prompt_len.mean())
    context_len = prompt_len + float(workload.output_len.mean()) / 2
    chunk = min(prompt_len, runner.config.prefill_chunk_tokens)

    def decode_ms(batch_size: int) -> float:
        try:
            plan = _plan(runner, batch_size)
        except NoUsableGraphError:
            return math.inf
        return times.decode_ms(plan.mode, plan.sizes or (batch_size,), context_len)

    prefill_ms = times.prefill_ms(math.ceil(chunk)) * max(1.0, prompt_len / chunk)
    return stable_batches(workload, runner.config.max_batch_size, decode_ms, prefill_ms)


def _plan(runner: ModelRunner, batch_size: int) -> StepPlan:
    graphs = runner.graph_runner
    return StepPlan("eager") if graphs is None else graphs.plan(batch_size)


def lock_in(stable: list[float], runner: ModelRunner) -> str | None:
    """Return a warning if a burst can lift the batch above the largest graph for good (sglang#33483)."""
    graphs = runner.graph_runner
    if graphs is None or len(stable) < 2 or not stable[0] <= graphs.max_bs < stable[-1]:
        return None
    return (
        f"at this rate batches of about {stable[0]:.1f} and of about {stable[-1]:.1f} are both stable: above the "
        f"largest capture size, {graphs.max_bs}, steps are slower, so a burst that lifts the batch over it "
        f"keeps it there. Raise capture.max_size to {math.ceil(stable[-1])} or more"
    )
