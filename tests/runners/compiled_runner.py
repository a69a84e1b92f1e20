"""A runner of twelve layers whose sizes are compiled, and what is asked of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch

from runners import compilation
from runners.capture import CaptureRecord, CompileCost
from runners.compile_counts import CompileCounts
from runners.model_runner import ModelRunner
from runners.models.loader import LoadedModel, ModelSpec, load_model
from runners.padding import StepPlan
from tests.runners.tiny_runner import CONFIG, MAX_SEQ_LEN, Requests, logits, tiny_config

NUM_LAYERS = 12
SIZES = (1, 2, 4)


def trace_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run what dynamo traced as it is: what is counted does not depend on the code generator."""
    monkeypatch.setattr(compilation, "code_generator", lambda mode: {"backend": "eager"})


def deep_model(device: str = "cpu", **fields: Any) -> LoadedModel:
    config = {**CONFIG, "num_hidden_layers": NUM_LAYERS, **fields}
    spec = ModelSpec("random", dtype="float32", seed=1, max_seq_len=MAX_SEQ_LEN, config=config)
    return load_model(spec, device)


@cache
def twelve_layers() -> LoadedModel:
    return deep_model()


@dataclass
class Events:
    """What a runner reported while it was built, in order."""

    names: list[tuple[str, int]] = field(default_factory=list)

    def on_capture(self, record: CaptureRecord) -> None:
        self.names.append(("capture", record.capture_size))

    def on_compile(self, size: int, cost: CompileCost) -> None:
        self.names.append(("compile", size))


def compiled_runner(
    loaded: LoadedModel | None = None, events: Events | None = None, **overrides: Any
) -> ModelRunner:
    settings = {"capture_sizes": SIZES, "max_batch_size": 4, "compile_mode": "default", **overrides}
    events = events or Events()
    return ModelRunner(
        loaded or twelve_layers(), tiny_config(**settings), events.on_capture, events.on_compile
    )


def counts(runner: ModelRunner) -> CompileCounts:
    assert runner.compile_counts is not None
    return runner.compile_counts


def run_steps(runner: ModelRunner) -> None:
    """A prompt, then decode steps of every batch size, captured or not, there and back."""
    requests = Requests(runner)
    for n in (4, 3, 2, 1, 2, 4):
        batch = requests.first(n)
        replayed = logits(runner, batch)
        assert runner.outcome is not None
        logits(runner, batch, StepPlan("eager", runner.outcome.sizes))
        torch.testing.assert_close(replayed, logits(runner, batch, StepPlan("eager")), rtol=1e-4, atol=1e-4)
    requests.release()
