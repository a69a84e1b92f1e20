"""Where the host time of a decode step goes: `python -m tests.bench.bench_host_prepare [cpu]`.

A model of Qwen3-0.6B's depth and heads, narrow elsewhere, decodes requests of unlike lengths that grow
by a token a step, so that pages are handed out and plans change as in serving. Prints a JSON line for
each batch size: the median µs of building the batch, of each part of the preparation, of the launch,
of what is left for after it, and of `host_prepare_us` as the runner itself reports it: with the plans of
growing requests (`host_prepare`), and for the same batch again and again after the host has waited for
0, 4 and 9 ms of the device's work (`repeated_after`), in which its caches go cold.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from runners.batches import decode_batch
from runners.forward_batch import ForwardBatch
from runners.model_runner import ModelRunner, RunnerConfig
from runners.models.loader import ModelSpec, load_model

BATCH_SIZES = (1, 8, 32, 128, 256)
MAX_SEQ_LEN = 1024
NUM_STEPS = 200
NUM_REPEATS = 40
WAITS_MS = (0, 4, 9)
#: At the clock of an H200 that is at work.
CYCLES_PER_MS = 1_980_000


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    config: dict[str, object] = {
        **{"model_type": "qwen3", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64},
        **{"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    }
    dtype = "bfloat16" if device == "cuda" else "float32"
    loaded = load_model(ModelSpec("random", dtype=dtype, max_seq_len=MAX_SEQ_LEN, config=config), device)
    sizes = BATCH_SIZES if device == "cuda" else BATCH_SIZES[:2]
    settings = RunnerConfig(
        device=device, max_batch_size=max(sizes), max_seq_len=MAX_SEQ_LEN, capture_sizes=sizes
    )
    with ModelRunner(loaded, settings) as runner:
        requests = Requests(runner, max(sizes))
        for size in sizes:
            print(json.dumps({"batch_size": size, **measure(runner, requests, size)}), flush=True)


class Requests:
    """Requests of unlike lengths that grow by a token a step."""

    def __init__(self, runner: ModelRunner, count: int) -> None:
        self.kv = runner.kv
        self.lens = np.random.default_rng(0).integers(300, 700, count).astype(np.int32)
        self.rows = np.array([runner.kv.add_request() for _ in range(count)], dtype=np.int32)
        for row, length in zip(self.rows.tolist(), self.lens.tolist(), strict=True):
            assert self.kv.extend(row, length)

    def step(self, count: int) -> ForwardBatch:
        lens = self.lens[:count]
        lens += 1
        lens[lens >= MAX_SEQ_LEN] = 300
        for index in np.flatnonzero((lens - 1) % self.kv.page_size == 0).tolist():
            assert self.kv.extend(int(self.rows[index]), int(lens[index]))
        ids = np.zeros(count, dtype=np.int64)
        return decode_batch(self.kv, self.rows[:count], lens.copy(), ids)


def measure(runner: ModelRunner, requests: Requests, size: int) -> dict[str, Any]:
    """Return the median µs of each part."""
    samples: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(NUM_STEPS):
        synchronize(runner)
        by_parts(runner, requests, size, samples)
        synchronize(runner)
        batch = requests.step(size)
        runner.forward(batch)
        assert runner.outcome is not None and runner.outcome.mode == "graph"
        samples["host_prepare"].append(runner.outcome.host_prepare_us)
    medians: dict[str, Any] = {name: round(statistics.median(values), 1) for name, values in samples.items()}
    waits = WAITS_MS if runner.device.type == "cuda" else WAITS_MS[:1]
    return {**medians, "repeated_after": {f"{ms} ms": repeated(runner, requests, size, ms) for ms in waits}}


def repeated(runner: ModelRunner, requests: Requests, size: int, wait_ms: int) -> float:
    """Return the median `host_prepare_us` of one batch run over and over, with a wait before each."""
    batch, samples = requests.step(size), []
    for _ in range(NUM_REPEATS):
        if wait_ms:
            torch.cuda._sleep(wait_ms * CYCLES_PER_MS)
        synchronize(runner)
        runner.forward(batch)
        assert runner.outcome is not None
        samples.append(runner.outcome.host_prepare_us)
        synchronize(runner)
    return round(statistics.median(samples), 1)


def by_parts(
    runner: ModelRunner, requests: Requests, size: int, samples: defaultdict[str, list[float]]
) -> None:
    """Do what a replay does, in its order, with a look at the clock between the parts."""
    graphs = runner.graph_runner
    assert graphs is not None
    batch = timed(samples["build_batch"], lambda: requests.step(size))
    timed(samples["choose"], lambda: graphs.plan(size))
    static = graphs._static_tensors()
    timed(samples["addresses"], lambda: graphs._addresses.check(graphs._static_tensors()))
    timed(samples["page_table"], runner.kv.flush)
    timed(samples["inputs_and_plan"], lambda: graphs._prepare(batch, size))
    timed(samples["launch"], graphs.graphs[size].replay)
    timed(samples["settle"], graphs._settle)
    timed(samples["confirm"], lambda: graphs._addresses.confirm(static))
    timed(samples["inputs_alone"], lambda: graphs.buffers.populate(batch))


def timed(samples: list[float], part: Callable[[], Any]) -> Any:
    started = time.perf_counter_ns()
    result = part()
    samples.append((time.perf_counter_ns() - started) / 1e3)
    return result


def synchronize(runner: ModelRunner) -> None:
    if runner.device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
