from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from harness.clock import FixedClock
from harness.executor import ModelExecutor
from harness.scheduler import SchedulerLimits, SchedulerPolicy
from harness.scheduler_loop import run_loop
from harness.workload.base import Workload
from runners.batches import extend_batch
from runners.model_runner import ModelRunner
from tests.harness.tiny import tiny_runner

PROMPT_LENS = np.array([5, 31, 17, 2, 40], dtype=np.int32)
OUTPUT_LENS = np.array([40, 25, 1, 33, 12], dtype=np.int32)


class _RememberingExecutor(ModelExecutor):
    """Keeps the answers, which the executor forgets once a request is finished."""

    def __init__(self, runner: ModelRunner, seed: int) -> None:
        super().__init__(runner, seed)
        self.answers: dict[int, list[int]] = {}

    def finish(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            self.answers[request_id] = self.generated(request_id, int(PROMPT_LENS[request_id])).tolist()
        super().finish(request_ids)


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    # 7 pages for requests that need up to 15 together: some must be preempted.
    with tiny_runner(
        {"attention.num_pages": 8, "attention.overcommit": True, "model.max_seq_len": 96}
    ) as runner:
        yield runner


def _serve(runner: ModelRunner, num_pages: int) -> tuple[dict[int, list[int]], int]:
    limits = SchedulerLimits(4, num_pages, runner.config.page_size, 24, runner.config.max_seq_len)
    policy, executor = SchedulerPolicy(limits), _RememberingExecutor(runner, seed=3)
    workload = Workload(np.zeros(5), PROMPT_LENS, OUTPUT_LENS)
    run_loop(policy, executor, FixedClock(1.0), workload, lambda row: None, lambda row: None)
    return executor.answers, policy.num_preemptions


def _alone(runner: ModelRunner, request_id: int) -> list[int]:
    """The request's greedy answer, each token by a fresh prefill of everything before it."""
    generator = np.random.default_rng((3, request_id))
    tokens = generator.integers(0, runner.vocab_size, PROMPT_LENS[request_id]).tolist()
    for _ in range(OUTPUT_LENS[request_id]):
        row = runner.kv.add_request()
        assert runner.kv.extend(row, len(tokens))
        output = runner.forward(extend_batch(runner.kv, [row], [0], [np.array(tokens, dtype=np.int64)]))
        tokens.append(int(output.next_token_logits.argmax()))
        runner.kv.release(row)
    return tokens[PROMPT_LENS[request_id] :]


def test_requests_served_together_get_the_tokens_they_would_get_alone(runner: ModelRunner) -> None:
    answers, _ = _serve(runner, num_pages=7)
    assert answers == {request_id: _alone(runner, request_id) for request_id in range(5)}


def test_preempted_requests_are_recomputed_to_the_same_tokens(runner: ModelRunner) -> None:
    roomy, _ = _serve(runner, num_pages=7)
    tight, num_preemptions = _serve(runner, num_pages=5)
    assert num_preemptions > 0
    assert tight == roomy


def test_every_page_and_row_comes_back(runner: ModelRunner) -> None:
    free = runner.kv.num_free_pages
    _serve(runner, num_pages=7)
    assert runner.kv.num_free_pages == free == 7
