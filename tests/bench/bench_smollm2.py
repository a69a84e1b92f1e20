"""Decode steps of SmolLM2 in bfloat16: paged replay, plain and compiled, against transformers.generate.

    make smollm2
    python -m pytest tests/bench/bench_smollm2.py -s

8 prompts of unlike lengths on two threads. `generate` gets them left-padded as one batch. All run in one process,
a round of each in turn. It prints ms a decode step, sampling included, and how many times as fast as `generate` the
replay is: at least 1, and at least 1.5 with compile=default. Ratios only mean something while the cores are idle.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from harness.model_cache import cached_model, is_fetched, remedy
from runners.batches import decode_batch, extend_batch
from runners.cpp_compiler import missing_for_cpu_kernels
from runners.model_runner import ModelRunner, RunnerConfig
from runners.models.loader import ModelSpec, load_model
from runners.token_reader import TokenReader
from tests.harness.smollm2_reference import tokenize
from tests.harness.test_real_weights import NAME, QUESTIONS, TEXTS

NUM_THREADS = 2
NUM_ROUNDS = 7
NUM_TOKENS = 48
MAX_SEQ_LEN = 160

pytestmark = [
    pytest.mark.skipif(not is_fetched(NAME), reason=f"{NAME}: {remedy(NAME)}"),
    pytest.mark.timeout(900),
]


class Clock(StoppingCriteria):
    """Notes when each token of `generate` is there."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.stamps.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Generate:
    """`transformers.generate` on the prompts, left-padded as one batch."""

    def __init__(self, prompts: list[list[int]]) -> None:
        auto_model: Any = AutoModelForCausalLM
        self.model = auto_model.from_pretrained(cached_model(NAME), dtype=torch.bfloat16)
        width = max(map(len, prompts))
        self.input_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        self.mask = torch.tensor(
            [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], dtype=torch.int64
        )

    def __call__(self) -> tuple[np.ndarray, np.ndarray]:
        clock = Clock()
        tokens = self.model.generate(
            self.input_ids,
            attention_mask=self.mask,
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        return np.diff(clock.stamps) * 1e3, tokens[:, self.input_ids.shape[1] :].numpy()


class Replay:
    """Prefill, then a replay a token, as the harness decodes."""

    def __init__(self, prompts: list[list[int]], compile_mode: str = "none") -> None:
        spec = ModelSpec(
            "pretrained", path=str(cached_model(NAME)), dtype="bfloat16", max_seq_len=MAX_SEQ_LEN
        )
        config = RunnerConfig(
            "cpu",
            max_batch_size=len(prompts),
            max_seq_len=MAX_SEQ_LEN,
            capture_sizes=(len(prompts),),
            compile_mode=compile_mode,
            compile_max_bs=len(prompts),
        )
        self.runner = ModelRunner(load_model(spec, "cpu"), config)
        self.reader = TokenReader(torch.device("cpu"), len(prompts))
        self.prompts = [np.array(prompt) for prompt in prompts]

    def __call__(self) -> tuple[np.ndarray, np.ndarray]:
        kv = self.runner.kv
        rows = np.array([kv.add_request() for _ in self.prompts], dtype=np.int32)
        lengths = np.array([len(prompt) for prompt in self.prompts], dtype=np.int32)
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            assert kv.extend(row, length + NUM_TOKENS)
        output = self.runner.forward(extend_batch(kv, rows.tolist(), [0] * len(rows), self.prompts))
        tokens, stamps = [self.reader.enqueue(output).read()], [time.perf_counter()]
        for _ in range(NUM_TOKENS - 1):
            lengths = lengths + np.int32(1)
            output = self.runner.forward(decode_batch(kv, rows, lengths, tokens[-1]))
            tokens.append(self.reader.enqueue(output).read())
            stamps.append(time.perf_counter())
        for row in rows.tolist():
            kv.release(row)
        return np.diff(stamps) * 1e3, np.stack(tokens, axis=1)


@dataclass
class Series:
    """The median step of each round, in ms, and the tokens of the last one."""

    run: Callable[[], tuple[np.ndarray, np.ndarray]]
    step_ms: list[float] = field(default_factory=list)
    tokens: np.ndarray | None = None

    def measure(self) -> None:
        steps, self.tokens = self.run()
        self.step_ms.append(float(np.median(steps)))


def ratio(reference: Series, series: Series) -> float:
    """Median over the rounds: a round's two medians were measured back to back."""
    return float(np.median(np.array(reference.step_ms) / np.array(series.step_ms)))


@pytest.mark.parametrize(("compile_mode", "at_least"), [("none", 1.0), ("default", 1.5)])
def test_replay_against_generate(compile_mode: str, at_least: float) -> None:
    if compile_mode != "none" and (missing := missing_for_cpu_kernels()):
        pytest.skip(missing)
    torch.set_num_threads(NUM_THREADS)
    prompts = tokenize(cached_model(NAME), QUESTIONS, TEXTS)
    generate, replay = Series(Generate(prompts)), Series(Replay(prompts, compile_mode))
    for series in (generate, replay):
        series.run()
    for _ in range(NUM_ROUNDS):
        generate.measure()
        replay.measure()

    found = ratio(generate, replay)
    assert generate.tokens is not None and replay.tokens is not None
    agreement = (generate.tokens == replay.tokens)[:, :8].mean()
    for name, series in (("generate", generate), (f"replay, compile={compile_mode}", replay)):
        print(f"\n{name:<24} {' '.join(f'{ms:6.1f}' for ms in series.step_ms)} ms a step", end="")
    print(f"\nreplay is {found:.2f} times as fast; {agreement:.0%} of the first 8 tokens agree")
    assert found >= at_least
