"""A step costs what a size sweep measured of what it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.scheduler import ScheduledStep
from harness.scheduler_loop import StepResult
from harness.step_times import CostTable, FixedTimes


def row(
    mode: str, batch_size: int, padded: int, step_ms: float | None, context_len: int = 100
) -> dict[str, object]:
    return {
        "mode": mode,
        "batch_size": batch_size,
        "padded_batch_size": padded,
        "step_ms_p50": step_ms,
        "context_len": context_len,
    }


def prefill(num_tokens: int, step_ms: float) -> dict[str, object]:
    return {"num_tokens": num_tokens, "context_len": num_tokens, "step_ms_p50": step_ms}


SIZES = [
    row("graph", 2, 2, 2.0),
    row("graph", 3, 4, 3.1),
    row("graph", 4, 4, 3.0),
    row("graph", 8, 8, 5.0),
    row("graph", 2, 2, 4.0, context_len=300),
    row("graph", 4, 4, 6.0, context_len=300),
    row("eager", 2, 2, 10.0),
    row("eager", 4, 4, 12.0),
    row("eager", 5, 5, None),
]
TABLE = CostTable(SIZES, [prefill(16, 1.0), prefill(64, 4.0)])


def step(phase: str, batch_size: int, num_tokens: int, num_kv_tokens: int) -> ScheduledStep:
    ids = list(range(batch_size))
    return ScheduledStep(0, phase, ids, ids, ids, [True] * batch_size, (), (), num_tokens, num_kv_tokens)  # type: ignore[arg-type]


def result(mode: str, padded: int, sizes: tuple[int, ...] = ()) -> StepResult:
    return StepResult(mode, "", padded, len(sizes), 123.0, sizes=sizes)


def test_a_graph_costs_what_its_rows_cost_padding_included() -> None:
    assert TABLE.cost_ms(step("decode", 3, 3, 300), result("graph", 4, (4,))) == 3.0
    assert TABLE.decode_ms("graph", (6,), 100) == pytest.approx(4.0), "between two sizes"
    assert TABLE.decode_ms("graph", (16,), 100) == 5.0, "the nearest beyond them"


def test_a_longer_context_costs_more() -> None:
    assert TABLE.cost_ms(step("decode", 4, 4, 800), result("graph", 4, (4,))) == pytest.approx(4.5)
    assert TABLE.decode_ms("graph", (4,), 1000) == 6.0


def test_a_split_costs_the_sum_of_its_parts() -> None:
    assert TABLE.cost_ms(step("decode", 6, 6, 600), result("split", 6, (4, 2))) == pytest.approx(5.0)


def test_an_eager_step_costs_what_eager_steps_cost() -> None:
    assert TABLE.cost_ms(step("decode", 3, 3, 300), result("eager", 3)) == pytest.approx(11.0)


def test_a_prefill_step_costs_by_its_tokens() -> None:
    assert TABLE.cost_ms(step("prefill", 2, 40, 40), result("eager", 2)) == pytest.approx(2.5)
    assert TABLE.prefill_ms(512) == 4.0


def test_a_fixed_time_may_differ_for_eager_decode_steps() -> None:
    same, two = FixedTimes(5.0), FixedTimes(5.0, 15.0)
    eager = step("decode", 3, 3, 300), result("eager", 3)
    assert (same.cost_ms(*eager), two.cost_ms(*eager)) == (5.0, 15.0)
    assert two.cost_ms(step("decode", 3, 3, 300), result("graph", 4, (4,))) == 5.0
    assert two.cost_ms(step("prefill", 1, 40, 40), result("eager", 1)) == 5.0


def test_what_was_not_measured_is_named() -> None:
    TABLE.require("graph", "eager")
    with pytest.raises(ConfigError, match="workload.costs_path=this run: has no measured compiled step"):
        TABLE.require("compiled")
    without_prefill = CostTable(SIZES, [])
    with pytest.raises(ConfigError, match="no measured prefill step.*measure.prefill_tokens"):
        without_prefill.require("graph")
    with pytest.raises(ConfigError, match="no measured eager step"):
        CostTable(SIZES[:4], []).decode_ms("eager", (2,), 100)


def test_the_tables_of_a_run_are_read_from_its_folder(tmp_path: Path) -> None:
    columns = list(SIZES[0])
    lines = [",".join("" if r[c] is None else str(r[c]) for c in columns) for r in SIZES]
    (tmp_path / "sizes.csv").write_text("\n".join([",".join(columns), *lines]) + "\n")
    (tmp_path / "prefill.csv").write_text("num_tokens,context_len,step_ms_p50\n16,16,1.0\n")
    table = CostTable.load(tmp_path / "sizes.csv")
    assert table.decode_ms("graph", (6,), 100) == pytest.approx(4.0)
    assert table.prefill_ms(16) == 1.0
