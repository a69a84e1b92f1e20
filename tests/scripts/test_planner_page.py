from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts import planner_page


def judged(name: str, num_graphs: int, step_ms: float) -> dict[str, object]:
    return {"name": name, "num_graphs": num_graphs, "step_ms": step_ms}


PLAN = {
    "sizes": [1, 8, 64],
    "verdict": {"decision": "use_plan", "gain": 0.05, "interval": [0.01, 0.09]},
    "judged": [
        judged("plan", 3, 4.75),
        *(judged(name, 12, 5.0) for name in ("vllm", "sglang", "tensorrt_llm", "lmdeploy")),
    ],
    "halves": [
        {"engine": "vllm", "num_graphs": 6, "gain": 0.04, "interval": [0.01, 0.07]},
        {"engine": "sglang", "num_graphs": 5, "gain": 0.04, "interval": [-0.01, 0.07]},
        {"engine": "tgi", "num_graphs": 2, "gain": -0.02, "interval": [-0.03, -0.01]},
        {"engine": "lmdeploy", "num_graphs": 2, "gain": 0.02, "interval": None},
    ],
    "warnings": ["3% of the steps"],
}


def test_a_plan_becomes_a_row_beside_the_engines_lists() -> None:
    *_, row = planner_page.plan_table({"a trace": PLAN}).splitlines()
    assert row == (
        "| a trace | 1 8 64 (3) | 4.750 | 5.000 | 5.000 | 5.000 | 5.000 | +5.00% [+1.00%, +9.00%] | use the plan |"
    )


def test_half_lists_are_told_by_where_their_interval_lies() -> None:
    *_, row = planner_page.halves({"a trace": PLAN}).splitlines()
    _, trace, faster, even, slower, _ = (cell.strip() for cell in row.split("|"))
    assert trace == "a trace"
    assert faster == "vllm (6: +4.00% [+1.00%, +7.00%])"
    assert even == "sglang (5: +4.00% [-1.00%, +7.00%]); lmdeploy (2: +2.00%)"
    assert slower == "tgi (2: -2.00% [-3.00%, -1.00%])"


def test_the_warnings_are_named() -> None:
    assert "- a trace: 3% of the steps." in planner_page.warnings({"a trace": PLAN})


def test_a_page_without_the_marks_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("no marks")
    monkeypatch.setattr(sys, "argv", ["planner_page.py", "--traces", str(tmp_path), "--page", str(page)])
    with pytest.raises(SystemExit):
        planner_page.main()
    assert page.read_text() == "no marks"
