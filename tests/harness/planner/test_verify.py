from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.clock import CostClock
from harness.errors import ConfigError
from harness.planner.contexts import ContextGrid
from harness.planner.cost_source import load_costs
from harness.planner.inputs import limits_of
from harness.planner.verbs import main_plan
from harness.planner.verify import Deviation, verify
from harness.record import JobRecord
from harness.record_reader import read_result
from harness.scheduler import ScheduledStep, SchedulerLimits, SchedulerPolicy
from harness.scheduler_loop import StepResult, run_loop
from harness.workload_replay import ReplayTally
from runners.step_policy import StepPolicy
from tests.harness.planner.measured_run import MAX_BATCH_SIZE, SIZES, graph_ms, poisson, prefill_ms, write_run

LIMITS = SchedulerLimits(MAX_BATCH_SIZE, MAX_BATCH_SIZE * 256, 16, 512, 4096)


class PricedModel:
    """Runs nothing; each step takes what the measured run says, times `slower`."""

    def __init__(self, slower: float) -> None:
        self._policy = StepPolicy(
            SIZES, padding="nearest", above_max="eager", on_miss="eager", graph_backend="cuda"
        )
        self._slower = slower

    def launch(self, step: ScheduledStep) -> PricedModel:
        if step.phase == "prefill":
            self._result = StepResult(
                "eager", "prefill", step.batch_size, 0, prefill_ms(max(16, step.num_tokens))
            )
            return self
        (size,) = self._policy.plan(step.batch_size).sizes
        self._result = StepResult("graph", "", size, 1, self._slower * graph_ms(size, step.num_kv_tokens))
        return self

    def resolve(self) -> StepResult:
        return self._result

    def preempt(self, request_ids: object) -> None: ...

    def finish(self, request_ids: object) -> None: ...


def replayed_run(job_dir: Path, slower: float = 1.0) -> Path:
    """A run with a workload replay by the real scheduler, on times that are those of its size sweep."""
    run = write_run(job_dir)
    record, tally = JobRecord.attach(run), ReplayTally()
    workload = poisson(400, 12.0)

    def on_step(row: dict[str, object]) -> None:
        tally.add(row)  # type: ignore[arg-type]
        record.append("steps", row)

    summary = run_loop(
        SchedulerPolicy(LIMITS),
        PricedModel(slower),  # type: ignore[arg-type]
        CostClock(lambda step, result: result.step_ms),
        workload,
        on_step,  # type: ignore[arg-type]
        lambda row: record.append("requests", row),
    )
    record.finish_all()
    record.update(workload={"clock": "costs", **tally.as_dict()})
    record.write_bench_serve(summary.bench_serve(), "cuda")
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return replayed_run(tmp_path_factory.mktemp("replayed"))


def verified(run: Path) -> dict[str, Deviation]:
    limits = LIMITS
    verification = verify(
        run, read_result(run), load_costs(run), limits, ContextGrid.up_to(limits.max_seq_len)
    )
    return {row.name: row for row in verification.rows}


def test_the_simulator_tells_tpot_and_mode_shares_of_a_replay_on_the_same_costs(run: Path) -> None:
    rows = verified(run)
    for name in (
        "mean TPOT (ms)",
        "mean decode step (ms)",
        "mean batch size",
        "decode steps",
        "mean E2EL (ms)",
    ):
        assert abs(rows[name].deviation or 0.0) < 0.01, name
    assert rows["share of graph steps"].predicted == rows["share of graph steps"].measured == 1.0


def test_the_limits_are_those_of_the_runs_configuration(run: Path) -> None:
    from harness.planner.arguments import parse_plan

    assert limits_of(read_result(run), parse_plan([str(run)])) == LIMITS


def test_verify_says_that_it_holds(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_plan(["--verify", str(run)]) == 0
    assert "mean TPOT" in capsys.readouterr().out


def test_verify_fails_where_the_machine_was_slower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_plan(["--verify", str(replayed_run(tmp_path, slower=1.3))]) == 1
    assert "beyond 5%" in capsys.readouterr().out


def test_a_run_without_a_workload_cannot_be_verified(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"workload\.enabled"):
        main_plan(["--verify", str(write_run(tmp_path))])


def test_shares_are_compared_by_difference_and_the_rest_by_ratio() -> None:
    assert Deviation("share", 0.5, 0.4, is_share=True).deviation == pytest.approx(0.1)
    assert Deviation("time", 5.5, 5.0).deviation == pytest.approx(0.1)
    assert Deviation("time", 5.5, None).deviation is None and Deviation("time", 5.5, None).is_within


def test_the_requests_are_those_that_were_replayed(run: Path) -> None:
    from harness.planner.verify import recorded_workload

    workload = recorded_workload(run, read_result(run))
    assert len(workload) == 400
    assert np.all(np.diff(workload.arrival_s) >= 0)
