"""Two steps in flight: the next one is launched before the tokens of the last one are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from harness.clock import FixedClock
from harness.executor import ModelExecutor
from harness.scheduler import SchedulerLimits, SchedulerPolicy
from harness.scheduler_loop import StepRow, run_loop
from harness.size_sweep import SizeSweep
from harness.workload.base import Workload
from runners.forward_batch import ForwardBatch, LogitsProcessorOutput
from runners.model_runner import ModelRunner
from tests.harness.tiny import tiny_runner
from tests.runners.past_only import PastOnlyBackend, runners_attend_with

PROMPT_LENS = np.array([5, 31, 17, 2, 40, 9], dtype=np.int32)
OUTPUT_LENS = np.array([40, 25, 1, 33, 12, 2], dtype=np.int32)
POOL: dict[str, Any] = {
    "attention.num_pages": 8, "attention.overcommit": True, "model.max_seq_len": 96,
}  # fmt: skip


class _Remembering(ModelExecutor):
    """Keeps the answers, and how many tokens went from one step to the next on the device."""

    def __init__(self, runner: ModelRunner, max_in_flight: int) -> None:
        super().__init__(runner, 3, max_in_flight)
        self.answers: dict[int, list[int]] = {}
        self.num_fed = 0

    def finish(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            self.answers[request_id] = self.generated(request_id, int(PROMPT_LENS[request_id])).tolist()
        super().finish(request_ids)

    def _last_tokens(self, *arguments: Any) -> Any:
        token_ids, source = super()._last_tokens(*arguments)
        self.num_fed += 0 if source is None else int((source >= 0).sum())
        return token_ids, source


@pytest.fixture(scope="module", params=["transformers", "fused"])
def runner(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    with tiny_runner({**POOL, "model.implementation": request.param}) as runner:
        yield runner


@pytest.fixture(scope="module")
def splitting_runner() -> Iterator[ModelRunner]:
    overrides = {"capture.policy": "explicit", "capture.sizes": [1, 2], "runner.above_max": "split"}
    with tiny_runner({**POOL, **overrides, "capture.max_size": 2}) as runner:
        yield runner


def serve(
    runner: ModelRunner, max_in_flight: int, num_pages: int = 7
) -> tuple[_Remembering, list[StepRow], int]:
    limits = SchedulerLimits(4, num_pages, runner.config.page_size, 24, runner.config.max_seq_len)
    policy, executor = SchedulerPolicy(limits), _Remembering(runner, max_in_flight)
    workload = Workload(np.zeros(len(PROMPT_LENS)), PROMPT_LENS, OUTPUT_LENS)
    rows: list[StepRow] = []
    run_loop(policy, executor, FixedClock(1.0), workload, rows.append, lambda row: None, max_in_flight)
    return executor, rows, policy.num_preemptions


@pytest.mark.parametrize("num_pages", [7, 5])
def test_overlap_changes_no_token(runner: ModelRunner, num_pages: int) -> None:
    one, _, _ = serve(runner, 1, num_pages)
    two, _, num_preemptions = serve(runner, 2, num_pages)
    assert two.answers == one.answers and len(two.answers) == len(PROMPT_LENS)
    assert one.num_fed == 0 < two.num_fed, "no token went from step to step on the device"
    assert num_preemptions > 0 or num_pages == 7


def logits(runner: ModelRunner, max_in_flight: int, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What each step of `serve` computes."""
    seen, forward = [], runner.forward

    def remember(batch: ForwardBatch) -> LogitsProcessorOutput:
        output = forward(batch)
        seen.append(output.next_token_logits.clone())
        return output

    with monkeypatch.context() as patch:
        patch.setattr(runner, "forward", remember)
        serve(runner, max_in_flight)
    return seen


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_page_that_reaches_the_device_after_its_step_changes_no_bit(
    runner: ModelRunner, max_in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with runners_attend_with(PastOnlyBackend):
        late_runner = tiny_runner({**POOL, "model.implementation": runner.loaded.implementation})
    with late_runner:
        late = logits(late_runner, max_in_flight, monkeypatch)
    at_once = logits(runner, max_in_flight, monkeypatch)
    assert all(torch.equal(one, other) for one, other in zip(late, at_once, strict=True))


def test_each_request_gets_as_many_tokens_as_it_asked_for(runner: ModelRunner) -> None:
    executor, _, _ = serve(runner, 2)
    assert [len(executor.answers[i]) for i in range(len(OUTPUT_LENS))] == OUTPUT_LENS.tolist()


def test_every_page_and_row_comes_back(runner: ModelRunner) -> None:
    serve(runner, 2)
    assert runner.kv.num_free_pages == 7


def test_tokens_are_fed_to_each_part_of_a_split(splitting_runner: ModelRunner) -> None:
    one, _, _ = serve(splitting_runner, 1)
    two, _, _ = serve(splitting_runner, 2)
    assert splitting_runner.graph_runner is not None
    assert splitting_runner.graph_runner.outcome_counts["split", "above_max"] > 0
    assert two.answers == one.answers


def test_a_sweep_with_overlap_measures_the_pace_and_says_so() -> None:
    from tests.harness.tiny import tiny_config

    overrides = {
        "measure.batch_sizes": [1, 3], "measure.context_lens": [8], "measure.min_samples": 4,
        "measure.timeout_s": 0.2,
    }  # fmt: skip
    config = tiny_config(overrides)
    with tiny_runner(overrides) as runner:
        rows, samples = [], []
        sweep = SizeSweep(runner, config.measure, 0, 1e9, overlap=True)
        sweep.run(lambda row, raw: (rows.append(row), samples.extend(raw)))
    assert rows and all(row["overlap"] and row["host_exposed_us_p50"] >= 0 for row in rows)
    assert {sample["timing"] for sample in samples} == {"overlapped", "back_to_back"}
