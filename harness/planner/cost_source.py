"""Reads a recorded run as a cost table, and refuses what must not be one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.errors import ConfigError
from harness.planner.capture_cost import CaptureCosts
from harness.planner.cost import CostSource, CostTable
from harness.planner.excess import ExcessRates
from harness.planner.host_time import HostTime, PrefillCurve
from harness.planner.surface import StepSurface, time_of
from harness.record import RecordError
from harness.record_reader import read_result, read_table
from runners.padding import StepCosts

if TYPE_CHECKING:
    import pyarrow as pa

#: The run that is used when none is named, so that a trace can be planned without a GPU: the H200 record whose
#: simulation lies within 5% of its replay.
DEFAULT_RUN = Path(__file__).parents[2] / "docs" / "results" / "planner_h200_8b"
#: Decode steps from which the host's time between steps is told.
_MIN_HOST_STEPS = 20


def read_run(run: str | Path) -> dict[str, Any]:
    """Return `result.json` of a run. Raises ConfigError if there is none, or a newer harness wrote it."""
    path = Path(run)
    if path == DEFAULT_RUN and not path.exists():
        raise ConfigError(
            "RUN",
            None,
            f"no run is named, and the default record, Qwen3-8B dimensions on an H200 ({path}), is not here: name a job's folder",
        )
    try:
        return read_result(path)
    except RecordError as error:
        raise ConfigError("RUN", run, str(error)) from error


def load_costs(run: str | Path, allow_unverified: bool = False) -> CostTable:
    """Return the cost table of the run recorded in the folder `run`.

    Raises ConfigError for a run whose graphs were emulated (its latencies are not a CUDA graph's), for
    one whose replay was not proven equal to eager unless `allow_unverified`, and for one without a
    size sweep of graphs.
    """
    result = read_run(run)
    _refuse_unverified(run, result, allow_unverified)
    rows = read_table(run, "sizes").to_pylist()
    graph_rows = [row for row in rows if row["mode"] in ("graph", "split")]
    if result.get("graph_backend") == "emulated" or any(r["graph_backend"] == "emulated" for r in graph_rows):
        raise ConfigError(
            "RUN",
            run,
            "its graphs were emulated, and no emulated time is a CUDA graph's: give a run on a GPU",
        )
    captures = CaptureCosts.from_rows(read_table(run, "capture").to_pylist())
    if captures is None:
        raise ConfigError("RUN", run, "has no capture.csv: give a run that captured graphs")
    loop, ragged = read_table(run, "loop").to_pylist(), read_table(run, "ragged").to_pylist()
    # With the loop measured, the host's time is known by itself, and a size's time is the device's alone.
    host = HostTime.from_loop(loop)
    column = "step_ms_p50" if host is None else "replay_ms_p50"
    surfaces = {
        mode: StepSurface.from_rows(rows, mode, column, with_padding=not ragged)
        for mode in ("graph", "eager")
    }
    if not surfaces["graph"]:
        raise ConfigError(
            "RUN", run, "measured no graph: give a run with runner=cuda_graph and measure.enabled=true"
        )
    excess = {
        mode: ExcessRates.from_rows(ragged, mode, surface, column) for mode, surface in surfaces.items()
    }
    steps = read_table(run, "steps")
    if host is None:
        clock = (result.get("workload") or {}).get("clock")
        host = _host_time(steps, surfaces["graph"].sizes[-1]) if clock == "measured" else HostTime()
        prefill = _prefill(read_table(run, "prefill"), steps, host)
    else:
        prefill = _loop_prefill(loop)
    return CostTable(
        source=_source(run, result, _throttled(graph_rows, column)),
        graph=surfaces["graph"],
        eager=surfaces["eager"],
        prefill=prefill,
        host=host,
        captures=captures,
        step_costs=StepCosts.from_rows(rows),
        graph_excess=excess["graph"],
        eager_excess=excess["eager"],
    )


def _refuse_unverified(run: str | Path, result: dict[str, Any], allow_unverified: bool) -> None:
    parity = result.get("parity") or {}
    if not parity.get("verified") and not allow_unverified:
        raise ConfigError(
            "RUN",
            run,
            "its replay was not proven equal to eager, so its times prove nothing: run it with parity.enabled=true, "
            "or add --allow-unverified",
        )


def _throttled(rows: list[dict[str, Any]], column: str) -> str | None:
    """Say how many points have no isolated sample, and what their times are."""
    num_throttled = sum(row[column] is None and time_of(row, column) is not None for row in rows)
    if not num_throttled:
        return None
    return (
        f"{num_throttled} of {len(rows)} graph times are of steps in a row: the card was throttled in all "
        "their isolated samples"
    )


def _source(run: str | Path, result: dict[str, Any], throttled: str | None) -> CostSource:
    warnings = [] if throttled is None else [throttled]
    if result["status"] != "ok":
        warnings.append(f"the run ended with status {result['status']}")
    verified = bool((result.get("parity") or {}).get("verified"))
    if not verified:
        warnings.append("unverified: replay was not proven equal to eager")
    if ((result.get("config") or {}).get("runner") or {}).get("overlap"):
        warnings.append("the run overlapped its steps; a simulation has one step in flight")
    environment = result.get("environment") or {}
    return CostSource(
        path=str(run),
        graph_backend=str(result.get("graph_backend")),
        verified=verified,
        model=(result.get("model") or {}).get("name"),
        device=environment.get("device_name") or environment.get("device"),
        warnings=tuple(warnings),
    )


def _prefill(prefill: pa.Table, steps: pa.Table, host: HostTime) -> PrefillCurve | None:
    """Chunks of `prefill.csv`, or else the medians of the workload's own prefill steps by tokens."""
    if prefill.num_rows:
        points = [
            (row["num_tokens"], max(0, row["context_len"] - row["num_tokens"]), row["step_ms_p50"])
            for row in prefill.to_pylist()
        ]
    else:
        points = [
            (row["num_tokens"], 0, row["step_ms"]) for row in steps.to_pylist() if row["phase"] == "prefill"
        ]
    return PrefillCurve.from_points(
        (tokens, cached, step_ms + host.ms(1)) for tokens, cached, step_ms in points if step_ms is not None
    )


def _loop_prefill(loop: list[dict[str, Any]]) -> PrefillCurve | None:
    """Chunks that the scheduler's loop ran between decode steps."""
    return PrefillCurve.from_points(
        (row["num_tokens"], row["num_cached_tokens"], row["pace_ms_mean"])
        for row in loop
        if row["phase"] == "prefill" and row["pace_ms_mean"] is not None
    )


def _host_time(steps: pa.Table, max_batch_size: int) -> HostTime:
    """What passes on the measured clock between steps, from decode steps.

    A decode step never follows an idle gap directly, so the clock's advance less the step's own time is
    the scheduler's and the executor's.
    """
    is_decode = (_phase(steps) == "decode")[1:]
    clock_ms = steps["clock_ms"].to_numpy().astype(np.float64)
    step_ms = steps["step_ms"].to_numpy().astype(np.float64)
    sizes = steps["batch_size"].to_numpy()[1:][is_decode]
    gaps = (np.diff(clock_ms) - step_ms[1:])[is_decode]
    if len(gaps) < _MIN_HOST_STEPS:
        return HostTime()
    unique, counts = np.unique(sizes, return_counts=True)
    medians = np.array([np.median(gaps[sizes == size]) for size in unique])
    if len(unique) < 3:
        return HostTime.linear(max(0.0, float(np.average(medians, weights=counts))), 0.0, max_batch_size)
    slope, base = np.polyfit(unique, medians, 1, w=np.sqrt(counts))
    return HostTime.linear(max(0.0, float(base)), max(0.0, float(slope)), max_batch_size)


def _phase(steps: pa.Table) -> np.ndarray[Any, Any]:
    return np.array(steps["phase"].to_pylist(), dtype=object)
