"""What an offline W&B run holds, gathered from the records of its `.wandb` file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.offline_run import read_records


@dataclass
class OfflineRun:
    """One run, as `wandb sync` would send it."""

    run_id: str = ""
    project: str = ""
    group: str = ""
    job_type: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    #: The rows logged, each with its `_step`.
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    #: Metric name (or glob) → the metric that is its x axis.
    step_metrics: dict[str, str] = field(default_factory=dict)
    #: Artifact type → the paths in it.
    artifacts: dict[str, list[str]] = field(default_factory=dict)
    exit_code: int | None = None

    def scalars(self) -> dict[str, Any]:
        """The summary without W&B's own keys, tables and plots."""
        return {
            key: value
            for key, value in self.summary.items()
            if not key.startswith("_") and not (isinstance(value, dict) and "_type" in value)
        }


def read_run(folder: Path) -> OfflineRun:
    """Read the one run whose folder is given."""
    (path,) = folder.glob("*.wandb")
    run = OfflineRun()
    for record in read_records(path):
        match record.WhichOneof("record_type"):
            case "run":
                head = record.run
                run.run_id, run.project = head.run_id, head.project
                run.group, run.job_type, run.tags = head.run_group, head.job_type, list(head.tags)
                _merge(run.config, head.config.update)
            case "config":
                _merge(run.config, record.config.update)
            case "history":
                row: dict[str, Any] = {}
                _merge(row, record.history.item)
                run.history.append(row | {"_step": record.history.step.num})
            case "summary":
                _merge(run.summary, record.summary.update)
            case "metric":
                run.step_metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
            case "artifact":
                paths = [entry.path for entry in record.artifact.manifest.contents]
                run.artifacts.setdefault(record.artifact.type, []).extend(paths)
            case "exit":
                run.exit_code = record.exit.exit_code
    return run


def _merge(target: dict[str, Any], items: Any) -> None:
    """Put items, each under a key or a nested key, into a nested dict."""
    for item in items:
        *parents, name = list(item.nested_key) or [item.key]
        inner = target
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = json.loads(item.value_json)
