from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigError
from harness.planner.plan_file import planned_sizes, read_plan, write_plan

CONTENT: dict[str, Any] = {"schema_version": "1.0", "kind": "capture_plan", "sizes": [1, 4, 16, 64]}


def written(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "plan.json"
    write_plan(path, CONTENT | changes)
    return path


def test_the_sizes_are_read_back(tmp_path: Path) -> None:
    plan = read_plan(written(tmp_path))
    assert plan.sizes == (1, 4, 16, 64) and plan.max_batch_size == 64


@pytest.mark.parametrize(("max_size", "sizes"), [(64, (1, 4, 16, 64)), (20, (1, 4, 16, 20)), (3, (1, 3))])
def test_a_plan_is_clipped_to_the_maximum_which_is_appended(
    tmp_path: Path, max_size: int, sizes: tuple[int, ...]
) -> None:
    assert planned_sizes(written(tmp_path), max_size) == sizes


def test_a_plan_for_smaller_batches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"up to 64, but up to 128.*--max-batch-size 128"):
        planned_sizes(written(tmp_path), 128)


def test_no_path_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"capture\.plan_path=null"):
        planned_sizes(None, 8)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kind": "other"}'])
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="the verb plan"):
        read_plan(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_plan(tmp_path / "absent.json")


@pytest.mark.parametrize("sizes", [None, [], [0, 4], [1.5], ["4"], [True]])
def test_sizes_that_are_no_capture_list_are_refused(tmp_path: Path, sizes: object) -> None:
    with pytest.raises(ConfigError, match="positive whole numbers"):
        read_plan(written(tmp_path, sizes=sizes))


def test_a_newer_major_version_is_refused_and_a_newer_minor_one_read(tmp_path: Path) -> None:
    assert read_plan(written(tmp_path, schema_version="1.9")).sizes[0] == 1
    with pytest.raises(ConfigError, match="upgrade"):
        read_plan(written(tmp_path, schema_version="2.0"))


def test_the_file_is_plain_json(tmp_path: Path) -> None:
    assert json.loads(written(tmp_path).read_text())["kind"] == "capture_plan"
