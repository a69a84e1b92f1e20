"""SmolLM2-135M-Instruct through paged replay, against transformers: the same tokens, whatever the padding.

The two run side by side. `make test` takes 16 tokens, a page of them; `make test-long`
takes 64, with every strategy.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from harness.model_cache import cached_model, is_fetched, remedy
from runners.model_runner import ModelRunner, RunnerConfig
from runners.models.loader import LoadedModel, ModelSpec, load_model
from runners.padding import StepCosts, StepPlan
from tests.harness.smollm2_reference import generate_one_by_one, tokenize
from tests.runners.tiny_models import paged_greedy

NAME = "smollm2_135m"
SHORT, LONG = 16, 64
MAX_SEQ_LEN = 160

pytestmark = pytest.mark.skipif(not is_fetched(NAME), reason=f"{NAME}: {remedy(NAME)}")

QUESTIONS = ["What is gravity?", "Name three rivers of Africa, and say which of them is the longest."]
TEXTS = [
    "The",
    "Once upon a time, there was a little girl who",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to you about the bicycle that I bought in your shop last week. "
    "When I came home with it, I found that the front wheel was bent and that the bell did not ring. I",
    "La capitale de la France est Paris. La capitale de l'Italie est",
]


@dataclass(frozen=True)
class Case:
    """Captured sizes at which a strategy does with 8 requests what no other strategy does."""

    sizes: tuple[int, ...]
    runs: StepPlan
    graph_ms: dict[int, float] | None = None


CASES = {
    "nearest": Case((4, 9), StepPlan("graph", (9,))),
    "exact": Case((8, 9), StepPlan("graph", (8,))),
    "max": Case((8, 10), StepPlan("graph", (10,))),
    "cheapest": Case((8, 11), StepPlan("graph", (11,)), {8: 3.0, 11: 2.0}),
    "split": Case((3, 5, 12), StepPlan("split", (5, 3)), {3: 1.0, 5: 1.0, 12: 9.0}),
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    prompts = tokenize(cached_model(NAME), QUESTIONS, TEXTS)
    assert len({len(prompt) for prompt in prompts}) == 8
    return prompts


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> Iterator[Callable[[int], Future[list[list[int]]]]]:
    """Number of tokens → the reference, being made in another process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield cache(lambda num: pool.submit(generate_one_by_one, cached_model(NAME), prompts, num))


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    spec = ModelSpec("pretrained", path=str(cached_model(NAME)), dtype="float32", max_seq_len=MAX_SEQ_LEN)
    return load_model(spec, "cpu")


@pytest.fixture(scope="module")
def loaded_fused() -> LoadedModel:
    spec = ModelSpec(
        "pretrained",
        str(cached_model(NAME)),
        dtype="float32",
        max_seq_len=MAX_SEQ_LEN,
        implementation="fused",
    )
    return load_model(spec, "cpu")


@dataclass(frozen=True)
class Decoded:
    """The tokens of one batch of all prompts, how often a step ran each way, and the parts of the last one."""

    tokens: list[list[int]]
    num_steps: dict[str, int]
    sizes: tuple[int, ...]


@pytest.fixture
def decode(
    expected: Callable[[int], object], request: pytest.FixtureRequest, prompts: list[list[int]]
) -> Callable[..., Decoded]:
    """Model, strategy and number of tokens → what became of the prompts, once the reference has begun."""

    def run(fixture: str, strategy: str, num_tokens: int) -> Decoded:
        expected(num_tokens)
        return _decode(request.getfixturevalue(fixture), strategy, CASES[strategy], prompts, num_tokens)

    return run


def _decode(
    loaded: LoadedModel, strategy: Any, case: Case, prompts: list[list[int]], num_tokens: int
) -> Decoded:
    config = RunnerConfig(
        "cpu",
        max_batch_size=12,
        max_seq_len=MAX_SEQ_LEN,
        capture_sizes=case.sizes,
        padding=strategy,
        num_warmup_steps=1,
    )
    with ModelRunner(loaded, config) as runner:
        graphs = runner.graph_runner
        assert graphs is not None
        graphs.set_step_costs(StepCosts(case.graph_ms) if case.graph_ms else None)
        tokens = paged_greedy(runner, prompts, num_tokens, chunk=64)
        num_steps = {mode: count for (mode, _), count in graphs.outcome_counts.items()}
        assert graphs.outcome is not None
        return Decoded(tokens, num_steps, graphs.outcome.sizes)


@pytest.mark.parametrize(
    ("strategy", "num_tokens"),
    [
        ("exact", SHORT),
        *(pytest.param(name, LONG, marks=pytest.mark.long) for name in CASES),
    ],
)
def test_one_paged_batch_on_the_graphs_of_a_strategy_gives_the_tokens_of_transformers_one_by_one(
    strategy: str,
    num_tokens: int,
    decode: Callable[..., Decoded],
    expected: Callable[[int], Future[list[list[int]]]],
) -> None:
    decoded, runs = decode("loaded", strategy, num_tokens), CASES[strategy].runs
    assert decoded.num_steps == {runs.mode: num_tokens - 1}
    assert decoded.sizes == runs.sizes
    assert decoded.tokens == expected(num_tokens).result()


@pytest.mark.parametrize("num_tokens", [SHORT, pytest.param(LONG, marks=pytest.mark.long)])
def test_the_fused_layers_give_the_tokens_of_transformers(
    num_tokens: int, decode: Callable[..., Decoded], expected: Callable[[int], Future[list[list[int]]]]
) -> None:
    """In float32, by the plain twins of the kernels; tests/gpu/test_fused_smollm2.py has the kernels."""
    decoded = decode("loaded_fused", "nearest", num_tokens)
    assert decoded.num_steps == {"graph": num_tokens - 1}
    assert decoded.tokens == expected(num_tokens).result()
