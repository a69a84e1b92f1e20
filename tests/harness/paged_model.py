"""A model small enough to check by hand: it insists on what an executor may rely on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.scheduler import ScheduledStep, SchedulerLimits
from harness.scheduler_loop import StepResult
from harness.workload.base import Request


def next_token(request_id: int, tokens: Sequence[int]) -> int:
    """The 'model': depends on every token before, as attention does."""
    return hash((request_id, tuple(tokens))) % 1000


def expected_tokens(request: Request) -> list[int]:
    """What a request is answered when it is alone."""
    tokens = prompt_of(request)
    for _ in range(request.output_len):
        tokens.append(next_token(request.request_id, tokens))
    return tokens[request.prompt_len :]


def prompt_of(request: Request) -> list[int]:
    return [request.request_id * 31 + position for position in range(request.prompt_len)]


@dataclass
class _Row:
    request: Request
    #: Prompt and generated tokens, as the device knows them.
    tokens: list[int]
    #: Tokens in the KV cache; empty without a row.
    cache: list[int] = field(default_factory=list)
    has_row: bool = False
    num_unread: int = 0


@dataclass
class PagedModel:
    """Executor that keeps real token ids, a KV cache by value, and counts of rows and pages."""

    limits: SchedulerLimits
    step_ms: float = 1.0
    answers: dict[int, list[int]] = field(default_factory=dict)
    max_rows: int = 0
    max_pages: int = 0
    num_in_flight: int = 0
    max_in_flight: int = 0
    steps: list[ScheduledStep] = field(default_factory=list)
    _known: dict[int, _Row] = field(default_factory=dict)

    def launch(self, step: ScheduledStep) -> PagedHandle:
        self.steps.append(step)
        for request in step.admitted:
            known = self._known.setdefault(request.request_id, _Row(request, prompt_of(request)))
            assert not known.has_row and not known.cache, "admitted twice"
            assert not known.num_unread, "recomputed before its newest token is known"
            known.has_row = True
        entries = zip(step.request_ids, step.starts, step.ends, step.yields_token, strict=True)
        for request_id, start, end, yields_token in entries:
            self._compute(self._known[request_id], start, end, yields_token)
        self._count()
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        return PagedHandle(self, step)

    def _compute(self, row: _Row, start: int, end: int, yields_token: bool) -> None:
        assert row.has_row, "no row"
        assert start == len(row.cache) and end > start, "a gap or an overlap in the KV cache"
        row.cache.extend(row.tokens[start:end])
        assert len(row.cache) == end, "a token that nobody has generated yet"
        assert yields_token == (end == len(row.tokens)), "a prefill stops early, or a token comes early"
        if yields_token:
            row.tokens.append(next_token(row.request.request_id, row.cache))
            row.num_unread += 1

    def _count(self) -> None:
        held = [row for row in self._known.values() if row.has_row]
        self.max_rows = max(self.max_rows, len(held))
        self.max_pages = max(self.max_pages, sum(self.limits.pages_for(len(row.cache)) for row in held))
        assert self.max_rows <= self.limits.max_batch_size
        assert self.max_pages <= self.limits.num_pages

    def preempt(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            row = self._known[request_id]
            assert row.has_row
            row.has_row, row.cache = False, []

    def finish(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            row = self._known.pop(request_id)
            assert request_id not in self.answers, "answered twice"
            self.answers[request_id] = row.tokens[row.request.prompt_len :]


@dataclass
class PagedHandle:
    model: PagedModel
    step: ScheduledStep

    def resolve(self) -> StepResult:
        self.model.num_in_flight -= 1
        for request_id, yields_token in zip(self.step.request_ids, self.step.yields_token, strict=True):
            self.model._known[request_id].num_unread -= yields_token
        return StepResult("graph", "", self.step.batch_size, 1, self.model.step_ms)
