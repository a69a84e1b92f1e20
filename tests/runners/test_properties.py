"""For any capture list, strategy and sequence of batches: parity holds, pages are conserved, outcomes add up."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runners.batches import decode_batch, extend_batch
from runners.forward_batch import ForwardBatch
from runners.model_runner import ModelRunner
from runners.padding import STRATEGIES, StepCosts, StepOutcome, StepPlan
from tests.runners.tiny_runner import MAX_SEQ_LEN, tiny_runner

MAX_BATCH_SIZE = 6
#: float32 logits of about 10: another shape may round otherwise in the last places.
TOLERANCE = 1e-4


class Traffic:
    """Requests that come, grow by a token a step, and go."""

    def __init__(self, runner: ModelRunner, rng: np.random.Generator) -> None:
        self.runner, self.rng = runner, rng
        #: row → tokens in the cache.
        self.lengths: dict[int, int] = {}

    def arrive(self) -> None:
        length = int(self.rng.integers(1, MAX_SEQ_LEN // 2))
        row = self.runner.kv.add_request()
        if not self.runner.kv.extend(row, length):
            self.runner.kv.release(row)
            return
        prompt = self.rng.integers(0, self.runner.vocab_size, length)
        self.runner.forward(extend_batch(self.runner.kv, [row], [0], [prompt]))
        self.lengths[row] = length

    def leave(self, row: int) -> None:
        self.runner.kv.release(row)
        del self.lengths[row]

    def next_batch(self, wanted: int) -> ForwardBatch:
        """The next token of up to `wanted` requests, in random order; those without pages left go."""
        while len(self.lengths) < wanted:
            before = len(self.lengths)
            self.arrive()
            if len(self.lengths) == before:
                break
        rows = self.rng.permutation(list(self.lengths)).tolist()[:wanted]
        for row in list(rows):
            if self.lengths[row] + 1 > MAX_SEQ_LEN or not self.runner.kv.extend(row, self.lengths[row] + 1):
                self.leave(row)
                rows.remove(row)
                continue
            self.lengths[row] += 1
        if not rows:
            return ForwardBatch.idle()
        lens = np.array([self.lengths[row] for row in rows], dtype=np.int32)
        tokens = self.rng.integers(0, self.runner.vocab_size, len(rows))
        return decode_batch(self.runner.kv, np.array(rows, dtype=np.int32), lens, tokens)


def eager_parts(runner: ModelRunner, batch: ForwardBatch, sizes: tuple[int, ...]) -> torch.Tensor:
    """The batch by eager steps at the padded shapes and plans of `sizes`."""
    parts, first = [], 0
    for size in sizes:
        end = min(first + size, batch.batch_size)
        part = batch.part(first, end)
        parts.append(runner.forward(part, StepPlan("eager", (size,))).next_token_logits.clone())
        first = end
    return torch.cat(parts)


def check_parity(runner: ModelRunner, batch: ForwardBatch) -> StepOutcome:
    """Contract 3 for one batch; returns how the strategy ran it."""
    replayed = runner.forward(batch).next_token_logits.clone()
    outcome = runner.outcome
    assert outcome is not None
    assert replayed.shape == (batch.batch_size, runner.vocab_size)
    if batch.batch_size == 0:
        return outcome
    unpadded = runner.forward(batch, StepPlan("eager")).next_token_logits
    if outcome.num_graphs:
        assert torch.equal(replayed, eager_parts(runner, batch, outcome.sizes))
    error = (replayed - unpadded).abs().max().item()
    assert error < TOLERANCE
    top2 = unpadded.topk(2).values
    clear = top2[:, 0] - top2[:, 1] > 4 * error
    assert torch.equal(replayed.argmax(-1)[clear], unpadded.argmax(-1)[clear])
    return outcome


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    capture_sizes=st.sets(st.integers(1, MAX_BATCH_SIZE), min_size=1),
    padding=st.sampled_from(list(STRATEGIES)),
    above_max=st.sampled_from(["eager", "split"]),
    poison=st.booleans(),
    costs=st.none() | st.dictionaries(st.integers(1, MAX_BATCH_SIZE), st.floats(0.1, 9.0), max_size=6),
    batch_sizes=st.lists(st.integers(0, MAX_BATCH_SIZE), min_size=1, max_size=8),
    num_pages=st.integers(6, 40),
    seed=st.integers(0, 2**16),
)
def test_parity_pages_and_outcomes(
    capture_sizes: set[int],
    padding: str,
    above_max: str,
    poison: bool,
    costs: dict[int, float] | None,
    batch_sizes: list[int],
    num_pages: int,
    seed: int,
) -> None:
    settings_: dict[str, Any] = {"padding": padding, "above_max": above_max, "poison_padding": poison}
    sizes = tuple(capture_sizes)
    with (
        warnings.catch_warnings(),
        tiny_runner(
            max_batch_size=MAX_BATCH_SIZE, capture_sizes=sizes, num_pages=num_pages, **settings_
        ) as runner,
    ):
        warnings.simplefilter("ignore", RuntimeWarning)
        graphs = runner.graph_runner
        assert graphs is not None
        if costs is not None:
            graphs.set_step_costs(StepCosts(graph_ms=costs, eager_ms=costs))
        traffic = Traffic(runner, np.random.default_rng(seed))
        expected: Counter[tuple[str, str]] = Counter()
        for wanted in batch_sizes:
            batch = traffic.next_batch(wanted)
            assert graphs.can_run(batch) == (graphs.plan(batch.batch_size).num_graphs > 0)
            outcome = check_parity(runner, batch)
            expected[outcome.mode, outcome.reason] += 1
            check_outcome(outcome, batch.batch_size, graphs.capture_bs)
            assert runner.kv.pool.conserved()

        counted = Counter({kind: n for kind, n in graphs.outcome_counts.items() if kind[1] != "forced"})
        assert counted == expected
        for row in list(traffic.lengths):
            traffic.leave(row)
        assert runner.kv.pool.conserved()
        assert runner.kv.num_free_pages == num_pages - 1


def check_outcome(outcome: StepOutcome, batch_size: int, capture_bs: list[int]) -> None:
    """An outcome says what ran, without contradicting itself."""
    assert outcome.batch_size == batch_size <= outcome.padded_batch_size
    assert outcome.host_prepare_us > 0
    assert outcome.num_graphs == (0 if outcome.mode == "eager" else len(outcome.sizes))
    assert set(outcome.sizes) <= set(capture_bs)
    assert (outcome.mode == "split") <= (outcome.num_graphs >= 1)
    assert (outcome.mode == "graph") <= (outcome.num_graphs == 1)
    if outcome.sizes:
        assert outcome.padded_batch_size == sum(outcome.sizes)
    else:
        assert outcome.padded_batch_size == batch_size
    assert (outcome.reason == "above_max") == (batch_size > capture_bs[-1])
