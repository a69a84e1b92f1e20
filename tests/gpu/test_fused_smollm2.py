"""SmolLM2-135M-Instruct through the fused layers on a GPU, against transformers along its own greedy text."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from harness.model_cache import cached_model, is_fetched, remedy
from runners.model_runner import ModelRunner, RunnerConfig
from runners.models.loader import ModelSpec, load_model
from tests.harness.smollm2_forced import Reference, make_reference, paged_logits
from tests.harness.smollm2_reference import tokenize
from tests.harness.test_real_weights import QUESTIONS, TEXTS

NAME, NUM_TOKENS, MAX_SEQ_LEN = "smollm2_135m", 64, 160

pytestmark = pytest.mark.skipif(not is_fetched(NAME), reason=f"{NAME}: {remedy(NAME)}")


@dataclass(frozen=True)
class Run:
    """The reference, and the logits of the fused layers along its text."""

    reference: Reference
    logits: torch.Tensor


@pytest.fixture(scope="module")
def run() -> Run:
    prompts = tokenize(cached_model(NAME), QUESTIONS, TEXTS)
    reference = make_reference(cached_model(NAME), prompts, NUM_TOKENS, "cuda")
    path = str(cached_model(NAME))
    spec = ModelSpec("pretrained", path, dtype="bfloat16", max_seq_len=MAX_SEQ_LEN, implementation="fused")
    loaded = load_model(spec, "cuda")
    config = RunnerConfig("cuda", len(prompts), MAX_SEQ_LEN, (len(prompts),))
    with ModelRunner(loaded, config) as runner:
        logits = paged_logits(runner, prompts, reference.tokens)
        assert runner.outcome is not None and runner.outcome.mode == "graph"
    return Run(reference, logits)


def test_the_tokens_are_those_of_transformers_wherever_the_gap_is_clear(run: Run) -> None:
    clear, expected = run.reference.clear(), torch.tensor(run.reference.tokens)
    assert clear.float().mean() > 0.5, "too few clear positions to prove anything"
    assert torch.equal(run.logits.argmax(-1)[clear], expected[clear])


def test_the_error_is_at_most_one_and_a_half_times_that_of_transformers(run: Run) -> None:
    theirs = run.reference.relative_error(run.reference.narrow)
    assert run.reference.relative_error(run.logits) <= 1.5 * theirs
