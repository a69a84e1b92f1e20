"""Continuous batching as a pure policy: numbers in, the next step out. No torch, no clock, no model.

A step is either a chunk of prefill (tokens of one or more prompts, packed) or a decode batch (one token
for each decoding request). The two take turns while both have work, so that decoding never stalls for
longer than one chunk, which is what the mixed step of vLLM V1 does to the batch size.

Requests are served in the order in which they were added. At any time the decoding requests are older
than the one being prefilled, which is older than the waiting ones; the youngest gives way first. That
order is why preemption ends: the oldest request is never preempted while another one holds pages.

The policy counts pages, it does not hand them out. `max_in_flight` steps may be scheduled before the
first of them is completed; a request's progress is therefore counted when it is scheduled and confirmed
when the step is completed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from harness.decoding_requests import DecodingRequests, RequestProgress
from harness.workload.base import Request

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What a batch may use. All numbers are at least 1; ValueError names the one that is not."""

    #: Requests that hold a row of the request table at one time.
    max_batch_size: int
    #: Pages that requests may hold: the pool's size *less the reserved null page*.
    num_pages: int
    #: Tokens a page.
    page_size: int
    #: Tokens a prefill step computes at most.
    prefill_chunk_tokens: int
    #: Tokens of prompt and output that a request may have.
    max_seq_len: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"SchedulerLimits.{name} is {getattr(self, name)}: it must be at least 1")

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output tokens of the longest request that can ever run alone."""
        return min(self.max_seq_len, self.num_pages * self.page_size)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """One step to run. Entry `i` of each list belongs to the same request; oldest request first.

    Nobody changes the lists: steps share them. While the same requests decode, each decode step's
    `request_ids` is the object of the one before.

    Before launching it, the executor gives back the rows of `preempted` and takes rows for `admitted`.
    A request admitted again after a preemption is prefilled from position 0 over its prompt *and* the
    tokens that it had generated; the token that this yields is its next one.
    """

    #: Number of the step, from 0.
    index: int
    phase: Phase
    request_ids: list[int]
    #: First position that the step computes, of each request.
    starts: list[int]
    #: One past the last position; also the request's tokens in the KV cache after the step.
    ends: list[int]
    #: Whether the step yields the request's next token: always in decode, in prefill with the last chunk.
    yields_token: list[bool]
    #: Requests that hold no row yet, new or preempted before; each is in `request_ids`.
    admitted: tuple[Request, ...]
    #: Requests that lost their pages to make room for this step; none is in `request_ids`.
    preempted: tuple[int, ...]
    #: Tokens computed: the sum of `ends` less the sum of `starts`.
    num_tokens: int
    #: Tokens in the KV cache that the step's requests attend to: the sum of `ends`.
    num_kv_tokens: int

    @property
    def batch_size(self) -> int:
        """Requests in the step."""
        return len(self.request_ids)


class SchedulerPolicy:
    """Decides the next step from requests and page counts; the same inputs give the same steps.

    `add` requests as they arrive, `schedule` a step, `complete` the scheduled steps in their order.
    `schedule` returns None when nothing can run now: because there is no work, or because the steps in
    flight must be completed first.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.num_free_pages = limits.num_pages
        self.num_preemptions = 0
        self._waiting: deque[RequestProgress] = deque()
        self._prefilling: RequestProgress | None = None
        self._decoding = DecodingRequests(limits.max_batch_size)
        #: Requests whose last token is in flight: they hold pages and a row, and need no further step.
        self._num_finishing = 0
        #: Steps that are not completed, each with the requests whose last token it yields.
        self._in_flight: deque[tuple[ScheduledStep, list[RequestProgress]]] = deque()
        self._num_steps = 0
        self._last_phase: Phase = "decode"

    @property
    def num_waiting(self) -> int:
        """Requests without pages: not admitted yet, or preempted."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold pages."""
        return len(self._decoding) + self._num_finishing + (self._prefilling is not None)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self.num_running)

    def add(self, request: Request) -> None:
        """Queue a request. ValueError if it could never run, however empty the pool."""
        check_request(self.limits, request)
        self._waiting.append(RequestProgress(request))

    def schedule(self) -> ScheduledStep | None:
        """Return the next step, its pages counted, or None if nothing can run now."""
        if self._last_phase == "decode":
            return self._schedule_prefill() or self._schedule_decode()
        return self._schedule_decode() or self._schedule_prefill()

    def complete(self, step: ScheduledStep) -> list[int]:
        """Confirm the oldest scheduled step; return the requests that it finished, their pages freed."""
        scheduled, finished = self._in_flight.popleft()
        assert scheduled is step, "steps are completed in the order in which they were scheduled"
        for progress in finished:
            self._free_pages(progress)
        self._num_finishing -= len(finished)
        return [progress.request_id for progress in finished]

    def pages_are_conserved(self) -> bool:
        """Whether free and held pages add up to the pool (an invariant, for tests)."""
        finishing = [progress for _, finished in self._in_flight for progress in finished]
        holders = [*finishing, *([self._prefilling] if self._prefilling else [])]
        num_tokens = sum(progress.capacity for progress in holders) + int(self._decoding.capacity.sum())
        num_held = num_tokens // self.limits.page_size
        return self.num_free_pages >= 0 and num_held + self.num_free_pages == self.limits.num_pages

    def _schedule_prefill(self) -> ScheduledStep | None:
        budget = self.limits.prefill_chunk_tokens
        chunks: list[tuple[RequestProgress, int]] = []
        admitted: list[Request] = []
        finished: list[RequestProgress] = []
        while budget and (progress := self._prefilling or self._admit(admitted)):
            chunk = min(budget, progress.prefill_len - progress.num_computed)
            chunks.append((progress, progress.num_computed))
            progress.num_computed += chunk
            budget -= chunk
            self._prefilling = progress
            if progress.num_computed == progress.prefill_len:
                self._prefilling = None
                self._start_decoding(progress, finished)
        if not chunks:
            return None
        ends = [progress.num_computed for progress, _ in chunks]
        step = ScheduledStep(
            index=self._num_steps,
            phase="prefill",
            request_ids=[progress.request_id for progress, _ in chunks],
            starts=[start for _, start in chunks],
            ends=ends,
            yields_token=[progress.num_computed == progress.prefill_len for progress, _ in chunks],
            admitted=tuple(admitted),
            preempted=(),
            num_tokens=self.limits.prefill_chunk_tokens - budget,
            num_kv_tokens=sum(ends),
        )
        return self._emit(step, finished)

    def _admit(self, admitted: list[Request]) -> RequestProgress | None:
        """Take the oldest waiting request if a row and the pages of its whole prefill are free.

        A free page for each decoding request stays back. Without it, a full pool would admit a request
        only to preempt it at the next page edge, and its prefill would be computed for nothing.
        """
        if not self._waiting or self.num_running == self.limits.max_batch_size:
            return None
        progress = self._waiting[0]
        prefill_len = progress.request.prompt_len + progress.num_outputs
        num_pages = self.limits.pages_for(prefill_len)
        if num_pages + len(self._decoding) > self.num_free_pages:
            return None
        if self._has_step_in_flight(progress.request_id):
            return None  # its newest token is not known yet
        self._waiting.popleft()
        progress.prefill_len = prefill_len
        progress.capacity = num_pages * self.limits.page_size
        self.num_free_pages -= num_pages
        admitted.append(progress.request)
        return progress

    def _has_step_in_flight(self, request_id: int) -> bool:
        return any(request_id in step.request_ids for step, _ in self._in_flight)

    def _start_decoding(self, progress: RequestProgress, finished: list[RequestProgress]) -> None:
        progress.num_outputs += 1
        if progress.num_outputs == progress.request.output_len:
            finished.append(progress)
            self._num_finishing += 1
        else:
            self._decoding.append(progress)

    def _schedule_decode(self) -> ScheduledStep | None:
        decoding = self._decoding
        if not len(decoding):
            return None
        preempted = self._secure_pages()
        if preempted is None:
            return None
        request_ids, yields_token = decoding.request_ids, decoding.all_yield
        starts, ends = decoding.advance()
        finished = decoding.take_done()
        self._num_finishing += len(finished)
        step = ScheduledStep(
            index=self._num_steps,
            phase="decode",
            request_ids=request_ids,
            starts=starts,
            ends=ends,
            yields_token=yields_token,
            admitted=(),
            preempted=tuple(preempted),
            num_tokens=len(ends),
            num_kv_tokens=sum(ends),
        )
        return self._emit(step, finished)

    def _secure_pages(self) -> list[int] | None:
        """Give a page to each decoding request that starts one, oldest first; preempt while there is none.

        Returns the preempted requests, or None to wait: pages of a finishing request are about to be
        freed, which costs nothing, whereas a preemption costs a prefill.
        """
        page_size, decoding = self.limits.page_size, self._decoding
        needy = decoding.starting_a_page()
        if not len(needy):
            return []
        if len(needy) > self.num_free_pages and self._num_finishing:
            return None
        served = needy[: self.num_free_pages]
        decoding.capacity[served] += page_size
        self.num_free_pages -= len(served)
        preempted: list[int] = []
        for place in needy[len(served) :].tolist():
            while not self.num_free_pages and place < len(decoding):
                preempted.append(self._preempt_youngest())
            if place >= len(decoding):  # it was itself the youngest, and so are all that follow
                break
            decoding.capacity[place] += page_size
            self.num_free_pages -= 1
        return preempted

    def _preempt_youngest(self) -> int:
        victim, self._prefilling = self._prefilling, None
        if victim is None:
            victim = self._decoding.pop()
        self._free_pages(victim)
        victim.num_computed = 0
        self._waiting.appendleft(victim)
        self.num_preemptions += 1
        return victim.request_id

    def _free_pages(self, progress: RequestProgress) -> None:
        self.num_free_pages += progress.capacity // self.limits.page_size
        progress.capacity = 0

    def _emit(self, step: ScheduledStep, finished: list[RequestProgress]) -> ScheduledStep:
        self._in_flight.append((step, finished))
        self._num_steps += 1
        self._last_phase = step.phase
        return step


def check_request(limits: SchedulerLimits, request: Request) -> None:
    """Raise ValueError, with the remedy, for a request that could never run under `limits`."""
    if request.prompt_len < 1 or request.output_len < 1:
        raise ValueError(
            f"request {request.request_id} has {request.prompt_len} prompt and {request.output_len} output "
            "tokens: both must be at least 1"
        )
    num_tokens = request.prompt_len + request.output_len
    if num_tokens > limits.max_request_tokens:
        raise ValueError(
            f"request {request.request_id} has {num_tokens} tokens, but model.max_seq_len and the KV pool "
            f"allow {limits.max_request_tokens}: set workload.over_length=clip or skip, or raise "
            "model.max_seq_len or attention.num_pages"
        )
