"""Decode steps in any order, made and changed in any way that a caller may: each computes what it would alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from runners.batches import decode_batch, extend_batch, fed_batch
from runners.forward_batch import ForwardBatch
from runners.model_runner import ModelRunner
from runners.padding import StepPlan
from tests.runners.alone import NUM_OUTPUTS, alone, prompt_of
from tests.runners.past_only import PastOnlyBackend, is_known, runners_attend_with
from tests.runners.tiny_runner import tiny_config, tiny_model

SIZES = (1, 3, 5)
PLANS = [
    None, StepPlan("graph", (5,)), StepPlan("eager"), StepPlan("eager", (5,)), StepPlan("split", (1, 1, 3)),
]  # fmt: skip
PROMPT_LENS = (1, 3, 8, 15, 16)
NUM_STEPS = 90


class Injected(Exception):
    """A launch that fails for a reason that nobody foresaw."""


class FailingBackend(PastOnlyBackend):
    """Fails between the preparation of a step and its launch, when told to."""

    fails = False
    num_late = 0

    def init_forward_metadata_replay_cuda_graph(self, *arguments: Any) -> None:
        super().init_forward_metadata_replay_cuda_graph(*arguments)
        self.num_late += not is_known(self.kv)
        if self.fails:
            raise Injected


# --- what a caller may do to a batch -----------------------------------------------------------


_INPUTS = ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens", "token_source")


def replaced(batch: ForwardBatch, name: str) -> ForwardBatch:
    """One input is another tensor, and the old one is spoilt."""
    old = getattr(batch, name)
    if old is not None:
        new = old.clone()
        batch = replace(batch, **{name: new}, **({"seq_lens_cpu": new} if name == "seq_lens" else {}))
        old.copy_(old.flip(0))
    return batch


def written_in_place(batch: ForwardBatch, name: str) -> ForwardBatch:
    """One input is first spoilt, as far as the array behind it, then put right."""
    tensor = getattr(batch, name)
    if tensor is not None:
        right = tensor.clone()
        tensor.zero_()
        tensor.copy_(right)
    return batch


def fed(batch: ForwardBatch, name: str) -> ForwardBatch:
    """A fed batch does not follow the one it was made of, which is spoilt; it does what is written to it."""
    source = batch.token_source
    made = fed_batch(batch, np.full(batch.batch_size, -1) if source is None else source.numpy())
    for spoilt in (batch.input_ids, batch.seq_lens, batch.req_pool_indices):
        spoilt.fill_(1)
    return written_in_place(made, name)


def copied(batch: ForwardBatch, name: str) -> ForwardBatch:
    return replaced(copy.deepcopy(batch), name)


CHANGES: list[Callable[[ForwardBatch, str], ForwardBatch]] = [replaced, written_in_place, fed, copied]


# --- requests ----------------------------------------------------------------------------------


@dataclass
class Live:
    """A request that holds pages for `length` tokens, all but its newest in the cache."""

    seed: int
    request_id: int
    prompt_len: int
    row: int
    length: int

    def token(self, position: int) -> int:
        prompt = prompt_of(self.seed, self.request_id, self.prompt_len)
        tokens, _ = alone(self.seed, self.request_id, self.prompt_len)
        return [*prompt.tolist(), *tokens][position]

    @property
    def is_done(self) -> bool:
        return self.length == self.prompt_len + NUM_OUTPUTS - 1


class Caller:
    """Takes requests in and out and steps them, at random."""

    def __init__(self, runner: ModelRunner, seed: int) -> None:
        self.runner, self.kv, self.random = runner, runner.kv, np.random.default_rng(seed)
        self.live: list[Live] = []
        #: The requests of the last step, whose next tokens are on the device.
        self.last: list[Live] = []

    def chance(self, share: float) -> bool:
        return bool(self.random.random() < share)

    def arrive(self) -> None:
        seed, request_id = int(self.random.integers(2)), int(self.random.integers(8))
        prompt_len = int(self.random.choice(PROMPT_LENS))
        row = self.kv.add_request()
        assert self.kv.extend(row, prompt_len)
        prompt, start = prompt_of(seed, request_id, prompt_len), int(self.random.integers(prompt_len))
        for span in ((0, start), (start, prompt_len)):
            if span[0] < span[1]:
                self.runner.forward(extend_batch(self.kv, [row], span[:1], [prompt[slice(*span)]]))
        self.live.append(Live(seed, request_id, prompt_len, row, prompt_len))
        self.last = [self.live[-1]]

    def leave(self, request: Live) -> None:
        self.kv.release(request.row)
        self.live.remove(request)

    def move(self, request: Live) -> None:
        """Copy a request's keys and values out, and into other pages: no prefill."""
        slots = torch.from_numpy(self.kv.slots(request.row, 0, request.length))
        caches = [cache.flatten(0, 1) for cache in (*self.kv.k_cache, *self.kv.v_cache)]
        kept = [cache[slots].clone() for cache in caches]
        old, request.row = request.row, self.kv.add_request()
        assert self.kv.extend(request.row, request.length)
        self.kv.release(old)
        slots = torch.from_numpy(self.kv.slots(request.row, 0, request.length))
        for cache, values in zip(caches, kept, strict=True):
            cache[slots] = values

    def get_pages(self, requests: list[Live]) -> None:
        """Pages for the next token of some requests or of all, before or with those of others."""
        more = self.live if self.chance(0.3) else requests
        if self.chance(0.2):
            assert all(self.kv.extend(request.row, request.length + 1) for request in requests)
        if self.chance(0.2):
            assert self.kv.open_pages(*arrays(more[:1]))
        if self.chance(0.1):
            self.move(requests[0])
        assert self.kv.open_pages(*arrays(more))

    def step(self) -> None:
        """Step some of the requests in any order, in any way; now and then at the second attempt."""
        waiting = [request for request in self.live if not request.is_done]
        chosen = self.random.permutation(len(waiting))[: self.random.integers(1, len(waiting) + 1)]
        requests = [waiting[i] for i in chosen]
        self.get_pages(requests)
        backend = self.runner.attn_backend
        assert isinstance(backend, FailingBackend)
        backend.fails = self.chance(0.1)
        try:
            self._run(requests)
        except Injected:
            backend.fails, self.last = False, []
            if self.chance(0.5):
                return  # it never comes; others may
            self._run(requests)

    def _run(self, requests: list[Live]) -> None:
        with torch.inference_mode() if self.chance(0.2) else nullcontext():
            batch = self.batch(requests)
            if self.chance(0.5):
                change = CHANGES[self.random.integers(len(CHANGES))]
                batch = change(batch, _INPUTS[self.random.integers(len(_INPUTS))])
            logits = self.runner.forward(batch, self.plan(len(requests))).next_token_logits.clone()
        assert is_known(self.kv)
        for request, values in zip(requests, logits, strict=True):
            request.length += 1
            expected = alone(request.seed, request.request_id, request.prompt_len)[1]
            torch.testing.assert_close(
                values, expected[request.length - request.prompt_len], rtol=0, atol=1e-4
            )
        self.last = requests

    def batch(self, requests: list[Live]) -> ForwardBatch:
        """A step of these requests; tokens that are on the device may come from there."""
        rows, lens = arrays(requests)
        tokens = np.array([request.token(request.length) for request in requests])
        if self.chance(0.5):
            return decode_batch(self.kv, rows, lens, tokens)
        places = {id(request): place for place, request in enumerate(self.last)}
        source = np.array([places.get(id(request), -1) for request in requests], dtype=np.int32)
        return decode_batch(self.kv, rows, lens, np.where(source < 0, tokens, 0), source)

    def plan(self, batch_size: int) -> StepPlan | None:
        plan = PLANS[self.random.integers(len(PLANS))]
        return None if plan is not None and plan.mode == "split" and batch_size < 3 else plan


def arrays(requests: list[Live]) -> tuple[np.ndarray, np.ndarray]:
    rows = [request.row for request in requests]
    return np.array(rows, dtype=np.int32), np.array([r.length + 1 for r in requests], dtype=np.int32)


@pytest.fixture(params=[1, 3, 16])
def runner(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    config = tiny_config(max_batch_size=6, page_size=request.param, capture_sizes=SIZES)
    with runners_attend_with(FailingBackend):
        runner = ModelRunner(tiny_model(), config)
    with runner:
        yield runner


@pytest.mark.parametrize("seed", [0, 1])
def test_each_step_computes_what_it_would_alone(runner: ModelRunner, seed: int) -> None:
    caller = Caller(runner, seed)
    assert runner.graph_runner is not None
    for index in range(NUM_STEPS):
        runner.graph_runner.poison_padding = index % 8 > 5
        for request in [r for r in caller.live if r.is_done or caller.chance(0.02)]:
            caller.leave(request)
        while not caller.live or (len(caller.live) < 5 and caller.chance(0.3)):
            caller.arrive()
        caller.step()
        assert runner.kv.pool.conserved()
    runner.kv.check_null_page()
    assert runner.attn_backend.num_late > 0
