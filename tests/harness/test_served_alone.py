"""Whatever order requests are served in, each gets the tokens that it gets alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from harness.executor import ModelExecutor
from harness.scheduler import ScheduledStep, SchedulerLimits, SchedulerPolicy
from harness.workload.base import Request
from runners.errors import PlanLayoutError
from runners.forward_batch import ForwardBatch, LogitsProcessorOutput
from runners.model_runner import ModelRunner
from runners.padding import StepPlan
from tests.runners.alone import NUM_OUTPUTS, alone
from tests.runners.past_only import PastOnlyBackend, is_known, runners_attend_with
from tests.runners.tiny_runner import tiny_config, tiny_model

#: Steps without a graph are wanted here.
pytestmark = pytest.mark.filterwarnings("ignore:a decode batch of:RuntimeWarning")
PROMPT_LENS = (1, 3, 8, 15, 16)
MAX_TOKENS = max(PROMPT_LENS) + NUM_OUTPUTS
MAX_BATCH_SIZE = 5
NUM_JOBS = 8


class Injected(Exception):
    """A launch that fails for a reason that nobody foresaw."""


class FragileBackend(PastOnlyBackend):
    """Fails now and then between the preparation of a step and its launch."""

    random = np.random.default_rng(0)
    layout_rate = failure_rate = 0.0
    num_late = num_layouts = 0

    def init_forward_metadata_replay_cuda_graph(self, *arguments: Any) -> None:
        super().init_forward_metadata_replay_cuda_graph(*arguments)
        self.num_late += not is_known(self.kv)
        if self.random.random() < self.layout_rate:
            self.num_layouts += 1
            raise PlanLayoutError("the layout differs")
        if self.random.random() < self.failure_rate:
            raise Injected


class RememberingRunner(ModelRunner):
    """Keeps the logits of the last step."""

    logits: torch.Tensor

    def forward(self, batch: ForwardBatch, plan: StepPlan | None = None) -> LogitsProcessorOutput:
        output = super().forward(batch, plan)
        self.logits = output.next_token_logits.clone()
        return output


@dataclass(frozen=True)
class Case:
    page_size: int
    #: Pages that requests may hold. The smallest number holds the longest request.
    num_pages: tuple[int, int]
    capture_sizes: tuple[int, ...]
    padding: str = "nearest"
    above_max: str = "eager"
    is_late: bool = True


CASES = [
    Case(1, (30, 44), (2, 5)),
    Case(1, (30, 44), (1, 2), above_max="split"),
    Case(3, (10, 16), (1, 3), padding="exact"),
    Case(3, (10, 16), (2, 3), padding="max", above_max="split"),
    Case(3, (10, 16), (1, 4), is_late=False),
    Case(16, (2, 5), (1, 2), above_max="split"),
    Case(16, (2, 5), (2, 5)),
]


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture
def runner(case: Case) -> Iterator[RememberingRunner]:
    config = tiny_config(
        max_batch_size=MAX_BATCH_SIZE,
        page_size=case.page_size,
        num_pages=case.num_pages[1] + 1,
        capture_sizes=case.capture_sizes,
        padding=case.padding,
        above_max=case.above_max,
    )
    with runners_attend_with(FragileBackend):
        runner = RememberingRunner(tiny_model(), config)
    runner.attn_backend.looks_up_past_only = case.is_late
    with runner:
        yield runner


class Job:
    """Random requests, which come at random, through the policy and the executor."""

    def __init__(self, runner: RememberingRunner, case: Case, seed: int) -> None:
        self.random = random = np.random.default_rng(seed)
        self.runner, self.seed, self.max_in_flight = runner, seed % 2, 1 + seed % 2
        num_pages = int(random.integers(case.num_pages[0], case.num_pages[1] + 1))
        chunk = int(random.integers(2, 20))
        limits = SchedulerLimits(MAX_BATCH_SIZE, num_pages, case.page_size, chunk, MAX_TOKENS)
        self.policy = SchedulerPolicy(limits)
        self.executor = ModelExecutor(runner, self.seed, self.max_in_flight)
        lens = zip(random.choice(PROMPT_LENS, 8), random.integers(1, NUM_OUTPUTS + 1, 8), strict=True)
        self.requests = [Request(i, 0.0, int(prompt), int(output)) for i, (prompt, output) in enumerate(lens)]
        self.to_come = deque(self.requests)
        self.in_flight: deque[tuple[ScheduledStep, Any]] = deque()
        self.num_answered = self.num_fed = 0

    def run(self, num_turns: int) -> None:
        """Serve for so many turns or to the end, and give everything back."""
        try:
            while num_turns and (self.to_come or self.policy.has_work):
                num_turns -= 1
                self._turn()
        except Injected:
            pass
        else:
            assert not num_turns or self.num_answered == len(self.requests)
        finally:
            self.executor.close()
        kv = self.runner.kv
        assert kv.pool.conserved() and kv.pool.num_held == 0
        kv.check_null_page()

    def _turn(self) -> None:
        while self.to_come and (not self.policy.has_work or self.random.random() < 0.3):
            self.policy.add(self.to_come.popleft())
        step = self.policy.schedule() if len(self.in_flight) < self.max_in_flight else None
        if step is not None:
            self._launch(step)
        if step is None or self.random.random() < 0.3:
            self._resolve()

    def _launch(self, step: ScheduledStep) -> None:
        self.executor.preempt(step.preempted)
        try:
            handle = self.executor.launch(step)
        except Injected:
            if step.phase == "prefill" or self.in_flight:
                raise
            handle = self.executor.launch(step)  # as if nothing had been
        self.in_flight.append((step, handle))
        self._check_logits(step)
        assert is_known(self.runner.kv) and self.runner.kv.pool.conserved()
        assert self.policy.pages_are_conserved()

    def _check_logits(self, step: ScheduledStep) -> None:
        logits = self.runner.logits
        assert len(logits) == step.batch_size
        for i, request_id in enumerate(step.request_ids):
            if step.yields_token[i]:
                prompt_len = self.requests[request_id].prompt_len
                expected = alone(self.seed, request_id, prompt_len)[1][step.ends[i] - prompt_len]
                torch.testing.assert_close(logits[i], expected, rtol=0, atol=1e-4)

    def _resolve(self) -> None:
        if not self.in_flight:
            return
        step, handle = self.in_flight.popleft()
        handle.resolve()
        finished = self.policy.complete(step)
        for request_id in finished:
            request = self.requests[request_id]
            tokens = self.executor.generated(request_id, request.prompt_len).tolist()
            assert tokens == alone(self.seed, request_id, request.prompt_len)[0][: request.output_len]
        self.executor.finish(finished)
        self.num_answered += len(finished)


def test_each_request_gets_the_tokens_that_it_gets_alone(case: Case, runner: RememberingRunner) -> None:
    backend, graphs = runner.attn_backend, runner.graph_runner
    assert isinstance(backend, FragileBackend) and graphs is not None
    num_preemptions = 0
    for seed in range(NUM_JOBS):
        graphs.poison_padding = seed % 3 > 0
        backend.random = np.random.default_rng(seed)
        backend.layout_rate, backend.failure_rate = 0.2 * (seed % 4 < 2), 0.05 * (seed > 3)
        job = Job(runner, case, seed)
        job.run(12 if seed == 2 else 10_000)
        num_preemptions += job.policy.num_preemptions
    assert num_preemptions and backend.num_layouts
    assert bool(backend.num_late) == case.is_late
