"""Reads a recorded run as a cost table, and refuses what must not be one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.errors import ConfigError
from harness.planner.capture_cost import CaptureCosts
from harness.planner.cost import CostSource, CostTable, HostTime, PrefillCurve
from harness.planner.surface import StepSurface
from harness.record import RecordError
from harness.record_reader import read_result, read_table
from runners.padding import StepCosts

if TYPE_CHECKING:
    import pyarrow as pa

#: The run that is used when none is named: measured on an H200, so that a trace can be planned without a GPU.
DEFAULT_RUN = Path(__file__).parents[2] / "docs" / "results" / "planner_h200"
#: Decode steps from which the host's time between steps is told.
_MIN_HOST_STEPS = 20


def read_run(run: str | Path) -> dict[str, Any]:
    """Return `result.json` of a run. Raises ConfigError if there is none, or a newer harness wrote it."""
    path = Path(run)
    if path == DEFAULT_RUN and not path.exists():
        raise ConfigError(
            "RUN",
            None,
            f"no run is named, and the default H200 record ({path}) is not here: name a job's folder",
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
    graph = StepSurface.from_rows(rows, "graph")
    if not graph:
        raise ConfigError(
            "RUN", run, "measured no graph: give a run with runner=cuda_graph and measure.enabled=true"
        )
    captures = CaptureCosts.from_rows(read_table(run, "capture").to_pylist())
    if captures is None:
        raise ConfigError("RUN", run, "has no capture.csv: give a run that captured graphs")
    steps = read_table(run, "steps")
    clock = (result.get("workload") or {}).get("clock")
    return CostTable(
        source=_source(run, result),
        graph=graph,
        eager=StepSurface.from_rows(rows, "eager"),
        prefill=_prefill(read_table(run, "prefill"), steps),
        host=_host_time(steps) if clock == "measured" else HostTime(),
        captures=captures,
        step_costs=StepCosts.from_rows(rows),
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


def _source(run: str | Path, result: dict[str, Any]) -> CostSource:
    warnings = []
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


def _prefill(prefill: pa.Table, steps: pa.Table) -> PrefillCurve | None:
    """Chunks of `prefill.csv`, or else the medians of the workload's own prefill steps by tokens."""
    if prefill.num_rows:
        tokens = prefill["num_tokens"].to_numpy().astype(np.float64)
        step_ms = prefill["step_ms_p50"].to_numpy().astype(np.float64)
    else:
        is_prefill = _phase(steps) == "prefill"
        tokens = steps["num_tokens"].to_numpy().astype(np.float64)[is_prefill]
        step_ms = steps["step_ms"].to_numpy().astype(np.float64)[is_prefill]
    measured = np.isfinite(step_ms)
    tokens, step_ms = tokens[measured], step_ms[measured]
    unique = np.unique(tokens)
    if not len(unique):
        return None
    return PrefillCurve(unique, np.array([np.median(step_ms[tokens == number]) for number in unique]))


def _host_time(steps: pa.Table) -> HostTime:
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
        return HostTime(max(0.0, float(np.average(medians, weights=counts))))
    slope, base = np.polyfit(unique, medians, 1, w=np.sqrt(counts))
    return HostTime(max(0.0, float(base)), max(0.0, float(slope)))


def _phase(steps: pa.Table) -> np.ndarray[Any, Any]:
    return np.array(steps["phase"].to_pylist(), dtype=object)
