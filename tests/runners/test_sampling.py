"""Sampling within the captured step: the right distribution, and the same tokens from the same seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runners.model_runner import ModelRunner
from runners.padding import StepPlan
from runners.sampling import Sampler, Sampling
from tests.runners.tiny_runner import Requests, tiny_config, tiny_model

CPU = torch.device("cpu")
NUM_DRAWS = 40_000


def frequencies(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """How often each token is drawn, of many rows of the same logits."""
    tokens = torch.empty(NUM_DRAWS, dtype=torch.int64)
    Sampler(sampling, CPU).sample(logits.expand(NUM_DRAWS, -1), tokens)
    return tokens.bincount(minlength=len(logits)) / NUM_DRAWS


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1.0), [0.4, 0.05, 0.3, 0.2, 0.05]),
        (Sampling(1.0, top_k=2), [4 / 7, 0, 3 / 7, 0, 0]),
        (Sampling(1.0, top_k=99), [0.4, 0.05, 0.3, 0.2, 0.05]),
        (Sampling(1.0, top_p=0.65), [4 / 7, 0, 3 / 7, 0, 0]),
        (Sampling(1.0, top_p=0.85), [4 / 9, 0, 3 / 9, 2 / 9, 0]),
        (Sampling(1.0, top_p=1e-6), [1, 0, 0, 0, 0]),
        # The share is that of the three that are left: 4/9 and 3/9 hold 0.7 of it.
        (Sampling(1.0, top_k=3, top_p=0.7), [4 / 7, 0, 3 / 7, 0, 0]),
        (Sampling(0.5), [0.4**2 / 0.295, 0.05**2 / 0.295, 0.3**2 / 0.295, 0.2**2 / 0.295, 0.05**2 / 0.295]),
        (Sampling(0.0), [1, 0, 0, 0, 0]),
    ],
)
def test_tokens_are_drawn_by_their_probability(sampling: Sampling, expected: list[float]) -> None:
    found = frequencies(torch.tensor([0.4, 0.05, 0.3, 0.2, 0.05]).log() + 3.0, sampling)
    # Five standard deviations of the largest count.
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=torch.float32), atol=5 * 0.5 / NUM_DRAWS**0.5, rtol=0
    )
    assert torch.equal(found > 0, torch.tensor(expected) > 0)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(1.0), Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.5)]
)
def test_a_poisoned_row_gives_a_valid_id(sampling: Sampling) -> None:
    tokens = torch.full((4,), -1)
    Sampler(sampling, CPU).sample(torch.full((4, 7), float("nan")), tokens)
    assert bool(((tokens >= 0) & (tokens < 7)).all())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, "at least 0"),
        ({"temperature": float("nan")}, "at least 0"),
        ({"temperature": float("inf")}, "finite"),
        ({"temperature": 1.0, "top_k": -1}, "or 0 for all"),
        ({"temperature": 1.0, "top_p": 0.0}, "above 0"),
        ({"temperature": 1.0, "top_p": 1.1}, "at most 1"),
        ({"top_k": 5}, "raise temperature"),
        ({"top_p": 0.9}, "raise temperature"),
    ],
)
def test_what_means_nothing_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**values)


STYLES = [Sampling(0.8, seed=5), Sampling(1.5, top_k=20, seed=5), Sampling(1.5, 40, 0.9, seed=5)]


def decode(runner: ModelRunner, plan: StepPlan | None, num_steps: int = 6) -> list[list[int]]:
    """The tokens of the same steps, from the start of the random numbers."""
    requests = Requests(runner)
    runner.sampler.reset()
    tokens = []
    for _ in range(num_steps):
        output = runner.forward(requests.batch(0, 1, 2, 3, 4, 5), plan)
        assert output.next_token_ids is not None
        tokens.append(output.next_token_ids.tolist())
    requests.release()
    return tokens


@pytest.mark.parametrize("sampling", STYLES)
def test_replay_samples_what_eager_does_at_the_same_shape(sampling: Sampling) -> None:
    with ModelRunner(tiny_model(), tiny_config(sampling=sampling)) as runner:
        replayed, eager = decode(runner, None), decode(runner, StepPlan("eager", (8,)))
        assert runner.outcome is not None and runner.outcome.mode == "eager"
        assert replayed == eager
        assert len({tuple(step) for step in replayed}) > 1, "every step drew the same numbers"
        split = StepPlan("split", (4, 2))
        assert decode(runner, split) == decode(runner, split)
        runner.sampler.sampling = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, seed=6)
        assert decode(runner, None) != replayed


def test_the_tokens_do_not_depend_on_how_many_warm_ups_there_were() -> None:
    answers = []
    for num_warmup_steps in (1, 3):
        config = tiny_config(sampling=STYLES[0], num_warmup_steps=num_warmup_steps)
        with ModelRunner(tiny_model(), config) as runner:
            output = runner.forward(Requests(runner, [1, 1]).batch())
            assert output.next_token_ids is not None
            answers.append(output.next_token_ids.tolist())
    assert answers[0] == answers[1]
