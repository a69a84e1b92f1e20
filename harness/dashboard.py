"""The verb dashboard: a W&B workspace, written as code, that answers which point of a sweep to use."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.durable import write_output
from harness.errors import ConfigError
from harness.extras import require_extra
from harness.record import RESULT_FILE
from harness.record_reader import job_folders, read_result
from harness.wandb_key import has_key

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Section, Workspace

_LOGIN = "run `wandb login`, or set WANDB_API_KEY; --json FILE writes the workspace without W&B"


@dataclass(frozen=True)
class Scope:
    """Whose runs the dashboard shows."""

    project: str
    #: None: the default entity of the key.
    entity: str | None = None
    #: None: all runs of the project.
    group: str | None = None

    @property
    def name(self) -> str:
        return f"CUDA graphs: {self.group or self.project}"


def main(argv: Sequence[str]) -> int:
    """Write the workspace, print where it is and return the exit code.

    Raises ConfigError without the package or a key, or where W&B does not take it.
    """
    options = _parser().parse_args(argv)
    scope = scope_of(options.target, options.entity, options.project)
    require_extra("sweep", ("wandb_workspaces",), "dashboard", options.target)
    if options.json is None:
        print(_save(scope))
        return 0
    text = json.dumps(specification(workspace(scope)), indent=2) + "\n"
    if options.json == "-":
        print(text, end="")
    else:
        write_output("--json", Path(options.json), text)
        print(options.json)
    return 0


def scope_of(target: str, entity: str | None = None, project: str | None = None) -> Scope:
    """Return the runs of a sweep's (or one job's) folder, which says where they went, or those of a project."""
    from harness.tracking import run_group

    folder = Path(target)
    jobs = [folder] if (folder / RESULT_FILE).exists() else job_folders(folder) if folder.is_dir() else []
    configs = [config for config in (read_result(job)["config"] for job in jobs) if config]
    if not configs:
        if jobs or "/" in target:
            raise ConfigError(
                "SWEEP_OR_PROJECT",
                target,
                "no folder that holds a job with a configuration: give the folder of a sweep, or the name of a project",
            )
        return Scope(project or target, entity)
    tracking = configs[0].get("tracking") or {}
    group = run_group(configs[0])
    if not group:
        raise ConfigError(
            "SWEEP_OR_PROJECT", target, "its jobs have no W&B group, as they were no sweep: give the project"
        )
    return Scope(project or str(tracking.get("project")), entity or tracking.get("entity"), group)


def workspace(scope: Scope) -> Workspace:
    """Return the workspace; nothing is sent."""
    from wandb_workspaces import expr
    from wandb_workspaces import workspaces as ws

    from harness.tracking_content import STATUS_KEY

    columns = ["run:displayName", f"summary:{STATUS_KEY}", "summary:figures/mean_decode_ms"]
    return ws.Workspace(
        entity=scope.entity or "",
        project=scope.project,
        name=scope.name,
        sections=sections(),
        runset_settings=ws.RunsetSettings(
            filters=[expr.Metric("Group") == scope.group] if scope.group else [],
            pinned_columns=[*columns, "summary:figures/padding_waste", "summary:figures/graph_mib"],
        ),
    )


def sections() -> list[Section]:
    """Return the panels; each key in them is one that `tracking_content` logs."""
    from wandb_workspaces import workspaces as ws
    from wandb_workspaces.reports import v2 as wr

    from harness.tracking_content import FAILED_KEY, FAILURE_TABLE

    def figure(name: str) -> Any:
        return wr.SummaryMetric(f"figures/{name}")

    def bars(title: str, key: str) -> Any:
        return wr.BarPlot(title=title, metrics=[wr.SummaryMetric(key)])

    step_times = [f"sizes/{mode}/step_ms_p50" for mode in ("graph", "eager")]
    pareto = wr.ScatterPlot(
        title="Pareto: mean decode step (ms) against graph memory (MiB); the line is the best so far",
        x=figure("graph_mib"),
        y=figure("mean_decode_ms"),
        running_ymin=True,
    )
    panels = {
        "Which point to use": [pareto, bars("Mean decode step (ms)", "figures/mean_decode_ms")],
        "Step time by batch size": [
            wr.LinePlot(title="Step, p50 (ms)", x="batch_size", y=list(step_times)),
            wr.LinePlot(
                title="Step, p50 (ms): each mode and context length",
                x="batch_size",
                metric_regex="sizes/.*/step_ms_p50",
            ),
        ],
        "Waste": [
            bars("Padding waste (share of the rows replayed)", "figures/padding_waste"),
            wr.ScatterPlot(
                title="Padding waste against the number of graphs",
                x=figure("num_sizes"),
                y=figure("padding_waste"),
            ),
        ],
        "Memory and start-up": [
            bars("Graph memory (MiB)", "figures/graph_mib"),
            wr.LinePlot(
                title="Graph pool by capture size (bytes)", x="capture_size", y=["captures/pool_bytes"]
            ),
            bars("Capturing (s)", "figures/seconds"),
        ],
        "Failed rows": [
            wr.WeavePanelSummaryTable(table_name=FAILURE_TABLE),
            bars("Failed (1) or not (0)", FAILED_KEY),
        ],
    }
    return [ws.Section(name=name, panels=list(of_it), is_open=True) for name, of_it in panels.items()]


def specification(made: Workspace) -> dict[str, Any]:
    """Return the workspace as W&B keeps it, JSON values only."""
    # NOTE: the package (0.4.13) has no public way to this.
    view: dict[str, Any] = made._to_model().model_dump(mode="json", by_alias=True, exclude_none=True)
    return view


def _save(scope: Scope) -> str:
    """Save the workspace as a new view of the project and return its address."""
    import wandb

    if not has_key():
        raise ConfigError("dashboard", scope.project, f"no W&B key on this machine: {_LOGIN}")
    try:
        made = workspace(Scope(scope.project, scope.entity or wandb.Api().default_entity, scope.group))
        made.save()
        return str(made.url)
    except Exception as error:  # W&B raises errors of its own, and those of requests
        reason = f"W&B did not take it ({type(error).__name__}: {error}): check the entity, the project and the key"
        raise ConfigError("dashboard", scope.project, f"{reason}; {_LOGIN}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness dashboard",
        description="Write a W&B workspace: step time by batch size, waste, memory, the Pareto set, failed rows. "
        "Each call saves a new view.",
    )
    parser.add_argument(
        "target", metavar="SWEEP_OR_PROJECT", help="folder of a sweep, or the name of a W&B project"
    )
    parser.add_argument("--entity", help="user or team (default: that of the sweep, or of the key)")
    parser.add_argument("--project", help="another project than the sweep's own")
    parser.add_argument(
        "--json", metavar="FILE", help="write the workspace to FILE (- for stdout), and send nothing"
    )
    return parser
