"""The file that a plan writes and `capture=planned` reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.durable import write_output
from harness.errors import ConfigError

if TYPE_CHECKING:
    from harness.planner.cost import CostSource
    from harness.planner.halves import HalfSize
    from harness.planner.honesty import Comparison
    from harness.planner.optimise import CaptureChoice
    from harness.planner.plan import Judged, Plan

#: Readers refuse a newer major version.
SCHEMA_VERSION = "1.1"
_KIND = "capture_plan"
_FIELD = "capture.plan_path"


@dataclass(frozen=True)
class PlanFile:
    """What of a plan others need. `content` is the whole file."""

    path: str
    sizes: tuple[int, ...]
    max_batch_size: int
    content: dict[str, Any]


def read_plan(path: str | Path) -> PlanFile:
    """Read a plan. Raises ConfigError for a file that is missing, no plan, or of a newer major version."""
    try:
        content = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(
            _FIELD, path, f"cannot be read: {error.strerror}; make it with the verb plan"
        ) from error
    except ValueError as error:
        raise ConfigError(_FIELD, path, f"is not JSON: {error}; make it with the verb plan") from error
    if not isinstance(content, dict) or content.get("kind") != _KIND:
        raise ConfigError(_FIELD, path, "is no plan; make one with the verb plan")
    version = str(content.get("schema_version"))
    if not version.split(".")[0].isdigit() or int(version.split(".")[0]) > int(SCHEMA_VERSION.split(".")[0]):
        raise ConfigError(
            _FIELD, path, f"has schema version {version}, this harness reads {SCHEMA_VERSION}: upgrade it"
        )
    sizes = content.get("sizes")
    if not isinstance(sizes, list) or not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise ConfigError(_FIELD, path, f"its sizes are {sizes!r}, not a list of positive whole numbers")
    return PlanFile(str(path), tuple(sorted(set(sizes))), max(sizes), content)


def planned_sizes(path: str | Path | None, max_size: int) -> tuple[int, ...]:
    """Return the sizes that `capture=planned` captures for batches up to `max_size`.

    A plan for larger batches is clipped, and the maximum appended. Raises ConfigError for a plan that
    ends below `max_size`, whose busiest batches it never considered.
    """
    if path is None:
        raise ConfigError(_FIELD, None, "capture=planned needs the file that the verb plan wrote")
    plan = read_plan(path)
    if plan.max_batch_size < max_size:
        raise ConfigError(
            _FIELD,
            path,
            f"was made for batches up to {plan.max_batch_size}, but up to {max_size} may run: plan again with "
            f"--max-batch-size {max_size}, or lower runner.max_batch_size",
        )
    return tuple(sorted({size for size in plan.sizes if size <= max_size} | {max_size}))


def write_plan(path: str | Path, content: dict[str, Any]) -> None:
    """Write a plan's content, as `plan_content` makes it, at once. Raises ConfigError where that is not possible."""
    write_output("--output", Path(path), json.dumps(content, indent=2, allow_nan=False) + "\n")


def plan_content(plan: Plan, source: CostSource, workload: dict[str, Any]) -> dict[str, Any]:
    """Return a plan as the content of its file; what was not measured is null."""
    simulation = plan.plan.traffic.simulation
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": _KIND,
        "sizes": list(plan.choice.sizes),
        "max_batch_size": max(plan.choice.sizes),
        "padding": plan.padding,
        "budget": asdict(plan.budget),
        "verdict": {
            "decision": "use_plan" if plan.is_recommended else "keep_default",
            "default": plan.default.name,
            **_comparison(plan.default.against),
        },
        "source": asdict(source),
        "workload": workload,
        "prediction": {
            "held_out_step_ms": plan.plan.step_ms,
            "device_bytes": plan.plan.device_bytes,
            "capture_seconds": plan.plan.seconds,
            "simulation": simulation.as_dict() if simulation else None,
        },
        "judged": [_judged(row) for row in (plan.plan, plan.default, *plan.engines)],
        "halves": [_half(row) for row in plan.halves],
        "hindsight_step_ms": plan.hindsight_step_ms,
        "optimality_gap": plan.choice.gap,
        "slack": asdict(plan.slack),
        "fit_share": plan.fit_share,
        "fixed_point": {"converged": plan.converged, "rounds": [list(sizes) for sizes in plan.rounds]},
        "front": [_choice(choice) for choice in plan.front],
        "warnings": plan.warnings,
    }


def _choice(choice: CaptureChoice) -> dict[str, Any]:
    return {
        "num_graphs": choice.num_graphs,
        "step_ms": choice.step_ms,
        "device_bytes": choice.device_bytes,
        "capture_seconds": choice.seconds,
        "sizes": list(choice.sizes),
    }


def _judged(row: Judged) -> dict[str, Any]:
    simulation = row.traffic.simulation
    return {
        "name": row.name,
        "num_graphs": len(row.sizes),
        "step_ms": row.step_ms,
        "device_bytes": row.device_bytes,
        "capture_seconds": row.seconds,
        "mean_tpot_ms": simulation.latency_ms["tpot"]["mean"] if simulation else None,
        "p99_tpot_ms": simulation.latency_ms["tpot"]["p99"] if simulation else None,
        "good_share": simulation.num_good / simulation.num_answered if simulation else None,
        "padding_waste": simulation.padding_waste() if simulation else None,
        **_comparison(row.against),
        "sizes": list(row.sizes),
    }


def _half(row: HalfSize) -> dict[str, Any]:
    return {
        "engine": row.engine.name,
        "engine_num_graphs": len(row.engine.sizes),
        "engine_step_ms": row.engine.step_ms,
        "max_graphs": row.max_graphs,
        "verdict": {
            "decision": "adopt" if row.is_adopted else "keep_default",
            "reason": row.reason,
            "regret": row.regret,
            "hindsight_gain": row.hindsight_gain,
        },
        **_judged(row.half),
        **_comparison(row.comparison),
    }


def _comparison(comparison: Comparison | None) -> dict[str, Any]:
    return {
        "gain": comparison.gain if comparison else None,
        "interval": list(comparison.interval) if comparison and comparison.interval else None,
        "beyond_share": comparison.beyond_share if comparison else None,
    }
