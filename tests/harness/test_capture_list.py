from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.capture_list import capture_list
from harness.errors import ConfigError
from harness.experiment import run_job
from harness.progress import Progress
from harness.record import Status
from harness.record_reader import read_result
from tests.harness.tiny import tiny_config, tiny_yaml


def write_plan(path: Path, sizes: list[int]) -> Path:
    path.write_text(json.dumps({"kind": "capture_plan", "schema_version": "1.0", "sizes": sizes}))
    return path


def planned(path: Path, **more: Any) -> dict[str, Any]:
    return {"capture.policy": "planned", "capture.plan_path": str(path), "capture.sizes": [], **more}


def test_a_planned_list_is_measured_by_the_next_run(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.json", [1, 3, 4])
    assert run_job(tiny_yaml(planned(plan)), tmp_path / "job", Progress(quiet=True)) is Status.OK
    assert read_result(tmp_path / "job")["capture"]["sizes"] == [1, 3, 4]


def test_a_plan_that_is_missing_or_no_plan_is_refused_before_anything_runs(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", write_plan(tmp_path / "empty.json", [])):
        with pytest.raises(ConfigError, match=r"capture\.plan_path"):
            capture_list(tiny_config(planned(path)))


def test_a_plan_path_goes_with_the_planned_policy_only(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.json", [1, 4])
    with pytest.raises(ConfigError, match="capture=planned only"):
        capture_list(tiny_config({"capture.plan_path": str(plan)}))
