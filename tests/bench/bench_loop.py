"""Host time of a decode step outside the model: `python -m tests.bench.bench_loop [OTHER_CHECKOUT]`.

Scheduler, executor, page bookkeeping and the loop's accounts are the real ones, on the CPU; the model's
forward answers at once. It is the thread's CPU time, so that other work on the machine counts little. With
another checkout both versions run in this process, in turns: the least time of each over the turns, the
ratio of the two, and between which bounds the turns' own ratios lie.

*steady*: one batch decodes, its requests open pages at unlike times; the median step. *churn*: a request ends
and another joins every three decode steps; the median over these rounds, its prefill step included, a decode step.
"""

from __future__ import annotations

import importlib
import itertools
import statistics
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

BATCH_SIZES = (1, 8, 64, 200)
NUM_TURNS = 7
PAGE_SIZE = 16
MAX_SEQ_LEN = 1024
PROMPT_LENS = np.arange(200, dtype=np.int32) % PAGE_SIZE + PAGE_SIZE
STEPS_BETWEEN_ENDS = 3
MODULES = (
    *("harness.clock", "harness.executor", "harness.scheduler", "harness.scheduler_loop"),
    *("harness.workload.base", "runners.attention.base", "runners.forward_batch", "runners.padding"),
    "runners.paged_kv",
)


def load(root: Path) -> dict[str, ModuleType]:
    """Import a checkout's modules afresh; those of another one stay in use beside them."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("harness", "runners")]:
        del sys.modules[name]
    sys.path.insert(0, str(root))
    modules = {name: importlib.import_module(name) for name in MODULES}
    sys.path.remove(str(root))
    assert all(Path(str(module.__file__)).is_relative_to(root) for module in modules.values())
    return modules


class StubRunner:
    """What an executor asks of a `ModelRunner`, with real pages and a model that answers at once."""

    vocab_size = 1000

    def __init__(self, modules: dict[str, ModuleType], batch_size: int) -> None:
        self.device = torch.device("cpu")
        self.config = SimpleNamespace(max_batch_size=batch_size, max_seq_len=MAX_SEQ_LEN)
        self.sampler = SimpleNamespace(reset=lambda: None)
        self.stopwatch: Any = None
        self.kv = modules["runners.paged_kv"].PagedKV(
            [modules["runners.attention.base"].AttentionGroup(1, 1, 2, 1.0)],
            num_pages=MAX_SEQ_LEN // PAGE_SIZE * batch_size + 1,
            page_size=PAGE_SIZE,
            max_requests=batch_size,
            max_seq_len=MAX_SEQ_LEN,
            dtype=torch.float32,
            device="cpu",
        )
        ids = torch.zeros(batch_size, dtype=torch.int64)
        make = modules["runners.forward_batch"].LogitsProcessorOutput
        self._outputs = [make(torch.empty(0), ids[:size]) for size in range(batch_size + 1)]
        self.outcome = modules["runners.padding"].StepOutcome("graph", "", batch_size, batch_size, 1, 0.0)

    def forward(self, batch: Any) -> Any:
        self.kv.flush()
        return self._outputs[batch.batch_size]


def us_a_step(modules: dict[str, ModuleType], batch_size: int, kind: str, max_in_flight: int) -> float:
    """Replay a workload of `kind` and return the host time of a decode step in µs."""
    ends: list[tuple[str, int, int]] = []

    class Clock(modules["harness.clock"].MeasuredClock):  # type: ignore[misc,name-defined]
        def advance(self, step: Any, result: Any, measured_ms: float) -> float:
            ends.append((step.phase, step.batch_size, time.thread_time_ns()))
            return float(super().advance(step, result, measured_ms))

    runner, scheduler = StubRunner(modules, batch_size), modules["harness.scheduler"]
    limits = scheduler.SchedulerLimits(batch_size, runner.kv.num_free_pages, PAGE_SIZE, 4096, MAX_SEQ_LEN)
    modules["harness.scheduler_loop"].run_loop(
        scheduler.SchedulerPolicy(limits),
        modules["harness.executor"].ModelExecutor(runner, 0, max_in_flight),
        Clock(),
        modules["harness.workload.base"].Workload(*lengths(batch_size, kind), batch_size),
        lambda row: None,
        lambda row: None,
        max_in_flight,
    )
    if kind == "steady":
        pairs = [pair for pair in itertools.pairwise(ends) if pair[0][:2] == pair[1][:2]]
        return statistics.median(after[2] - before[2] for before, after in pairs) / 1e3
    joins = [place for place, (phase, _, _) in enumerate(ends) if phase == "prefill"]
    rounds = [pair for pair in itertools.pairwise(joins) if pair[1] - pair[0] > 1]
    return statistics.median((ends[b][2] - ends[a][2]) / (b - a - 1) for a, b in rounds) / 1e3


def lengths(batch_size: int, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Arrival times, prompt lengths and output lengths."""
    if kind == "steady":
        prompts = PROMPT_LENS[:batch_size]
        outputs = np.full(batch_size, 600, dtype=np.int32)
    else:
        prompts = np.resize(PROMPT_LENS, batch_size + 300)
        outputs = np.full(len(prompts), STEPS_BETWEEN_ENDS * batch_size + 1, dtype=np.int32)
        outputs[:batch_size] = STEPS_BETWEEN_ENDS * np.arange(1, batch_size + 1) + 1
    return np.zeros(len(prompts)), prompts, outputs


def main() -> None:
    roots = [Path(__file__).resolve().parents[2], *(Path(root).resolve() for root in sys.argv[1:2])]
    versions = [load(root) for root in roots]
    for kind in ("steady", "churn"):
        for batch_size in BATCH_SIZES:
            for max_in_flight in (1, 2):
                case = batch_size, kind, max_in_flight
                turns = [[us_a_step(modules, *case) for modules in versions] for _ in range(NUM_TURNS)]
                print(f"{kind}, batch {batch_size}, {max_in_flight} in flight: {describe(turns)}")


def describe(turns: list[list[float]]) -> str:
    least = [min(column) for column in zip(*turns, strict=True)]
    if len(least) == 1:
        return f"{least[0]:.0f} µs a step"
    ratios = sorted(this / other for this, other in turns)
    return f"{least[0]:.0f} µs, {least[1]:.0f} there: {least[0] / least[1]:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


if __name__ == "__main__":
    main()
