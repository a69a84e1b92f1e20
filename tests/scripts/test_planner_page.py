from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.planner.cost_source import DEFAULT_RUN, load_costs
from scripts import planner_page


def judged(name: str, num_graphs: int, step_ms: float) -> dict[str, object]:
    return {"name": name, "num_graphs": num_graphs, "step_ms": step_ms}


def half(
    name: str, num_graphs: int, gain: float, interval: list[float] | None, reason: str
) -> dict[str, object]:
    verdict = {
        "decision": "adopt" if reason == "no_slower" else "keep_default",
        "reason": reason,
        "regret": max(0.0, -gain),
        "hindsight_gain": gain + 0.005,
    }
    row = {"engine": name, "engine_num_graphs": 12, "num_graphs": num_graphs, "verdict": verdict}
    return row | {"gain": gain, "interval": interval}


PLAN = {
    "sizes": [1, 8, 64],
    "verdict": {"decision": "use_plan", "gain": 0.05, "interval": [0.01, 0.09], "beyond_share": 0.02},
    "prediction": {"simulation": {"mean_batch_size": 7.25}},
    "judged": [
        judged("plan", 3, 4.75),
        *(judged(name, 12, 5.0) for name in ("vllm", "sglang", "tensorrt_llm", "lmdeploy")),
    ],
    "halves": [
        half("vllm", 6, 0.04, [0.01, 0.07], "no_slower"),
        half("sglang", 5, 0.04, [-0.01, 0.07], "within_noise"),
        half("tgi", 2, -0.02, [-0.03, -0.01], "slower"),
        half("lmdeploy", 2, 0.02, None, "too_little_traffic"),
    ],
    "warnings": ["3% of the steps"],
}


def test_a_plan_becomes_a_row_beside_the_engines_lists() -> None:
    *_, row = planner_page.plan_table({"a trace": PLAN}).splitlines()
    assert row == (
        "| a trace | 1 8 64 (3) | 4.750 | 5.000 | 5.000 | 5.000 | 5.000 | +5.00% [+1.00%, +9.00%] | use the plan |"
    )


def test_each_engine_has_its_verdict_on_each_trace() -> None:
    *_, vllm, sglang, tgi, lmdeploy, _, counted = planner_page.halves({"one": PLAN, "two": PLAN}).splitlines()
    adopt = "**adopt** 6 graphs: +4.00% [+1.00%, +7.00%]"
    assert vllm == f"| vllm (12) | {adopt} | {adopt} |"
    assert "**keep**, 5 graphs: +4.00% [-1.00%, +7.00%], within noise" in sglang
    assert "**keep**, 2 graphs: -2.00% [-3.00%, -1.00%], slower, in hindsight -1.50%" in tgi
    assert "**keep**, 2 graphs: +2.00%, too little traffic" in lmdeploy
    assert counted.startswith("Of 8 verdicts 2 are to adopt and 6 to keep, 2 of these")


def test_each_record_has_its_load_its_plan_and_its_verdicts() -> None:
    *_, row = planner_page.by_record({Path("docs/results/one"): {"a trace": PLAN}}).splitlines()
    assert row == (
        "| `one` | a trace | 7.2 | 2.0% | 3 | +5.00% [+1.00%, +9.00%] | use the plan | "
        "1 no slower, 1 slower, 1 too little traffic, 1 within noise |"
    )


def test_the_warnings_are_named() -> None:
    assert "- a trace: 3% of the steps." in planner_page.warnings({"a trace": PLAN})


def test_a_check_says_whether_the_simulator_holds_and_what_its_costs_lack() -> None:
    lacks = load_costs(DEFAULT_RUN).source.warnings
    text = planner_page.check(DEFAULT_RUN)
    assert all(f"- {warning}." in text for warning in lacks)
    assert text.startswith(f"`docs/results/{DEFAULT_RUN.name}` (")
    mean_tpot = next(line for line in text.splitlines() if line.startswith("| mean TPOT (ms) |"))
    within = abs(float(mean_tpot.split("|")[-2].strip().rstrip("%"))) <= 5
    assert ("**hold**" if within else "**do not hold**") in text.splitlines()[-1]


def test_a_page_without_the_marks_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("no marks")
    monkeypatch.setattr(sys, "argv", ["planner_page.py", "--traces", str(tmp_path), "--page", str(page)])
    with pytest.raises(SystemExit):
        planner_page.main()
    assert page.read_text() == "no marks"
