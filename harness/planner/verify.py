"""How far prediction and measurement lie apart: the simulator against a run's own workload replay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.errors import ConfigError
from harness.planner.simulate import simulate
from harness.planner.step_errors import step_errors
from harness.planner.step_times import Runner, step_times
from harness.record_reader import read_bench_serve, read_table
from harness.workload.base import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from harness.planner.contexts import ContextGrid
    from harness.planner.cost import CostTable
    from harness.planner.simulation import Simulation
    from harness.planner.step_errors import KindError
    from harness.scheduler import SchedulerLimits

#: What the simulator promises of TPOT and of mode shares.
TOLERANCE = 0.05


@dataclass(frozen=True)
class Deviation:
    """One number, predicted and measured."""

    name: str
    predicted: float | None
    measured: float | None
    #: Shares are compared by difference, everything else by ratio.
    is_share: bool = False
    #: Whether it decides the verdict.
    counts: bool = True

    @property
    def deviation(self) -> float | None:
        """Predicted over measured less 1, or the difference of shares; None where either is unknown."""
        if self.predicted is None or self.measured is None:
            return None
        if self.is_share:
            return self.predicted - self.measured
        return self.predicted / self.measured - 1 if self.measured else None

    @property
    def is_within(self) -> bool:
        return self.deviation is None or abs(self.deviation) <= TOLERANCE


@dataclass(frozen=True)
class Verification:
    """A run's measured replay beside its simulation."""

    rows: list[Deviation]
    num_requests: int
    #: Each kind of step, on the batches that ran.
    kinds: list[KindError]
    #: What is to be known of the measurements behind the prediction.
    notes: list[str]

    @property
    def holds(self) -> bool:
        """Whether every number that counts lies within the tolerance."""
        return all(row.is_within for row in self.rows if row.counts)


def recorded_workload(run: str | Path, result: Mapping[str, Any]) -> Workload:
    """Return the requests that a run replayed, from `requests.parquet`. ConfigError if it replayed none."""
    table = read_table(run, "requests")
    if not table.num_rows:
        raise ConfigError("--verify", run, "replayed no workload: give a run with workload.enabled=true")
    order = np.argsort(table["request_id"].to_numpy())
    columns = [table[name].to_numpy()[order] for name in ("arrival_s", "prompt_len", "output_len")]
    config = (result.get("config") or {}).get("workload") or {}
    concurrency = config.get("max_concurrency")
    if config.get("kind") == "steady":
        concurrency = config.get("batch_size") or (result["config"]["runner"]["max_batch_size"])
    return Workload(
        columns[0].astype(np.float64), columns[1].astype(np.int32), columns[2].astype(np.int32), concurrency
    )


def verify(
    run: str | Path,
    result: Mapping[str, Any],
    costs: CostTable,
    limits: SchedulerLimits,
    grid: ContextGrid,
) -> Verification:
    """Simulate a run's own requests under its own list on `costs`, and set the two side by side."""
    workload = recorded_workload(run, result)
    config = result["config"]
    runner = Runner(config["padding"]["strategy"], config["runner"]["above_max"], config["runner"]["on_miss"])
    sizes = (result.get("capture") or {}).get("sizes") or []
    if not sizes:
        raise ConfigError("--verify", run, "captured no graph: give a run with runner=cuda_graph")
    times = step_times(costs, sizes, limits.max_batch_size, limits.prefill_chunk_tokens, grid, runner)
    predicted = simulate(times, limits, workload)
    return Verification(
        _deviations(run, result, predicted),
        len(workload),
        step_errors(run, times),
        [*costs.source.warnings, *drift_notes(run)],
    )


def drift_notes(run: str | Path) -> Iterator[str]:
    """Say by how much the host and the device changed their speed while `run` was measured."""
    between = [
        row["replay_round_std"]
        for row in read_table(run, "sizes").to_pylist()
        if row["mode"] != "eager" and row.get("replay_round_std") is not None
    ]
    if between:
        yield (
            f"drift of the device between the rounds of the size sweep: standard deviation {np.median(between):.1%} "
            f"in the median, {max(between):.1%} at most"
        )
    paces: dict[tuple[object, ...], dict[str, float]] = {}
    for row in read_table(run, "loop").to_pylist():
        kind = (row["phase"], row["previous"], row["batch_size"], row["num_tokens"], row["num_cached_tokens"])
        host_ms = row["host_ms_mean"] if row["phase"] == "decode" else row["pace_ms_mean"]
        paces.setdefault(kind, {})[row["moment"]] = host_ms
    for phase, what in (("decode", "of the host in decode steps"), ("prefill", "of prefill chunks")):
        ratios = [
            ms["after"] / ms["before"] - 1 for kind, ms in paces.items() if kind[0] == phase and len(ms) == 2
        ]
        if ratios:
            yield f"drift {what} from before the replay to after it: median {np.median(ratios):+.1%}"


def _deviations(run: str | Path, result: Mapping[str, Any], predicted: Simulation) -> list[Deviation]:
    summary = read_bench_serve(run) or {}
    replay = result.get("workload") or {}
    latency = predicted.latency_ms
    rows = [
        Deviation("mean TPOT (ms)", latency["tpot"]["mean"], summary.get("mean_tpot_ms")),
        Deviation("median TPOT (ms)", latency["tpot"]["median"], summary.get("median_tpot_ms"), counts=False),
        Deviation("mean TTFT (ms)", latency["ttft"]["mean"], summary.get("mean_ttft_ms"), counts=False),
        Deviation("mean E2EL (ms)", latency["e2el"]["mean"], summary.get("mean_e2el_ms"), counts=False),
        Deviation("mean decode step (ms)", predicted.mean_step_ms, _measured_step_ms(run), counts=False),
        Deviation("mean batch size", predicted.mean_batch_size, replay.get("mean_batch_size"), counts=False),
        Deviation("decode steps", predicted.num_decode_steps, replay.get("num_decode_steps"), counts=False),
        Deviation(
            "padding waste", predicted.padding_waste(), replay.get("padding_waste"), True, counts=False
        ),
    ]
    measured_shares = replay.get("mode_shares") or {}
    shares = predicted.mode_shares()
    rows += [
        Deviation(
            f"share of {mode} steps", shares.get(mode, 0.0), measured_shares.get(mode, 0.0), is_share=True
        )
        for mode in sorted({*shares, *measured_shares})
    ]
    return rows


def _measured_step_ms(run: str | Path) -> float | None:
    """Mean advance of the measured clock over a decode step, which no idle gap precedes."""
    steps = read_table(run, "steps")
    is_decode = np.array([phase == "decode" for phase in steps["phase"].to_pylist()])[1:]
    gaps = (
        np.diff(steps["clock_ms"].to_numpy().astype(np.float64))[is_decode] if len(is_decode) else np.zeros(0)
    )
    return float(gaps.mean()) if len(gaps) else None
