"""Where the host time of a decode step goes: `python -m tests.bench.bench_host_prepare [cpu] [fused]`.

With `fused` the steps are those of the fused layers in the steady state of two in flight: our own attention,
which plans nothing, and token ids that the step before has left on the device.

With `cpu` there is no FlashInfer and no graph: its C++ planner is replaced by a call of the same
arguments that does nothing, the graphs launch nothing, and before each step other memory is read, as cold
caches as a host that waited for the device would find. What is left is the Python side, to be compared with
itself before and after a change, and with nothing measured on a GPU.

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
from operator import is_
from typing import Any

import numpy as np
import torch

from runners import model_runner
from runners.attention.decode_planner import DecodeKernel, DecodePlanner
from runners.attention.decode_schedule import (
    DecodeSchedule,
    IntArray,
    PageBounds,
    PlanArrays,
    PlanLayout,
    SplitRule,
)
from runners.attention.flashinfer_workspace import PlanStaging
from runners.attention.host_pages import HostLens, HostPages
from runners.attention.torch_backend import TorchAttentionBackend
from runners.attention.triton_backend import TritonAttentionBackend
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
#: More than the second-level cache of a host holds, and much of the third.
COLD_BYTES = 32 * 2**20
#: Chunks that fit the grid of the decode kernel of 8 key heads.
NUM_CHUNKS = 148


def main() -> None:
    device = "cpu" if "cpu" in sys.argv else "cuda"
    is_fused = "fused" in sys.argv
    config: dict[str, object] = {
        **{"model_type": "qwen3", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64},
        **{"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    }
    if device == "cpu":  # the cache of the real heads would take 60 GB
        config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    dtype = "bfloat16" if device == "cuda" else "float32"
    implementation = "fused" if is_fused else "transformers"
    loaded = load_model(
        ModelSpec(
            "random", dtype=dtype, max_seq_len=MAX_SEQ_LEN, config=config, implementation=implementation
        ),
        device,
    )
    sizes = BATCH_SIZES
    if device == "cpu":
        model_runner.create_attention_backend = stub_backend  # type: ignore[assignment]
    settings = RunnerConfig(
        device=device, max_batch_size=max(sizes), max_seq_len=MAX_SEQ_LEN, capture_sizes=sizes
    )
    with ModelRunner(loaded, settings) as runner:
        if device == "cpu":
            launch_nothing(runner)
        requests = Requests(runner, max(sizes), is_fused)
        for size in sizes:
            print(json.dumps({"batch_size": size, **measure(runner, requests, size)}), flush=True)


class Requests:
    """Requests of unlike lengths that grow by a token a step."""

    def __init__(self, runner: ModelRunner, count: int, is_fed: bool) -> None:
        self.kv = runner.kv
        self.is_fed = is_fed
        self.lens = np.random.default_rng(0).integers(300, 700, count).astype(np.int32)
        self.rows = np.array([runner.kv.add_request() for _ in range(count)], dtype=np.int32)
        for row, length in zip(self.rows.tolist(), self.lens.tolist(), strict=True):
            assert self.kv.extend(row, length)

    def step(self, count: int) -> ForwardBatch:
        lens = self.lens[:count]
        lens += 1
        lens[lens >= MAX_SEQ_LEN] = 300
        assert self.kv.open_pages(self.rows[:count], lens)
        ids = np.zeros(count, dtype=np.int64)
        source = np.arange(count, dtype=np.int32) if self.is_fed else None
        return decode_batch(self.kv, self.rows[:count], lens, ids, source)


# --- without a GPU -----------------------------------------------------------------------------


class StubKernel:
    """A decode wrapper whose C++ planner does nothing; it is handed what FlashInfer's would take.

    Its plans are those of 132 multiprocessors with nine blocks each: from 149 requests on none is split.
    """

    def __init__(self, batch_size: int | None, staging: PlanStaging, pages: HostPages) -> None:
        self._staging = staging
        self._layout: PlanLayout = (148, 0, 0, 0, 592, 1184, 2304, 2288, 1, 1)
        workspace = torch.zeros(64, dtype=torch.uint8)
        counts = (batch_size, 16, 8, 16, True, -1, 0.0, 128, 128)
        empty = torch.empty(0)
        self._args = [workspace, workspace, None, pages.indptr, *counts, empty, empty]

    def plan(self, pages: HostPages) -> PlanLayout:
        self._args[2] = self._staging.acquire()
        self._schedule: DecodeSchedule | None = None
        self._counts = pages.counts.copy()
        return tuple(self._plan(*self._args))

    def serves(self, counts: IntArray) -> bool:
        if self._schedule is None:
            rule = SplitRule(16, NUM_CHUNKS)
            self._schedule = DecodeSchedule.make(rule, planned(rule, self._counts), self._counts)
            assert self._schedule is not None
        return self._schedule.serves(counts)

    def bounds(self, counts: IntArray) -> PageBounds | None:
        return self._schedule.bounds(counts) if self.serves(counts) and self._schedule else None

    def _plan(self, *args: Any) -> PlanLayout:
        return self._layout

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        return q


def planned(rule: SplitRule, counts: IntArray) -> PlanArrays:
    """Return what FlashInfer's planner would write."""
    whole = np.arange(len(counts) + 1, dtype=np.int32)
    if len(counts) >= NUM_CHUNKS:
        return PlanArrays(False, 0, whole)
    chunk = rule.min_chunk_pages
    while (-(-counts // chunk)).sum() > NUM_CHUNKS:
        chunk += 1
    whole[1:] = np.cumsum(-(-counts // chunk))
    return PlanArrays(True, chunk * rule.page_size, whole)


class StubBackend(TorchAttentionBackend):
    """Computes with torch, and plans decode steps with the planner of FlashInfer's backend."""

    looks_up_past_only = True
    replay_plans_from = "lengths"

    def __init__(self, groups: Any, kv: Any, **options: Any) -> None:
        super().__init__(groups, kv, **options)
        self._host_pages = HostPages(options["max_batch_size"], kv.page_size, kv.page_table.shape[1])
        self._staging = PlanStaging(2**16, 8, options["device"])
        self.decode = DecodePlanner(self._make_kernels, self._host_pages)

    def _make_kernels(self, batch_size: int | None) -> list[DecodeKernel]:
        return [StubKernel(batch_size, self._staging, self._host_pages)]

    def init_forward_metadata_capture_cuda_graph(self, bs: int, *args: Any) -> None:
        super().init_forward_metadata_capture_cuda_graph(bs, *args)
        self.decode.plan_capture(bs, args[1], args[2], 1)

    def init_forward_metadata_replay_cuda_graph(
        self, bs: int, rows: Any, lens: Any, lens_sum: int, mode: Any, lens_cpu: torch.Tensor
    ) -> None:
        self.decode.plan_replay(bs, rows, lens, lens_cpu)

    def settle(self) -> None:
        self._staging.settle()
        self.decode.settle()


class PlanlessBackend(TorchAttentionBackend):
    """Computes with torch, and prepares decode steps as the fused layers' own backend does."""

    looks_up_past_only = True
    replay_plans_from = "nothing"

    def __init__(self, groups: Any, kv: Any, **options: Any) -> None:
        super().__init__(groups, kv, **options)
        self._static_lens = HostLens()
        self._longest = np.array(self.max_seq_len, dtype=np.int32)

    init_forward_metadata_replay_cuda_graph = (
        TritonAttentionBackend.init_forward_metadata_replay_cuda_graph  # type: ignore[assignment]
    )


def stub_backend(name: str, groups: Any, kv: Any, options: Any) -> TorchAttentionBackend:
    limits = {"max_batch_size": options.max_batch_size, "max_seq_len": options.max_seq_len}
    kind = PlanlessBackend if options.fused else StubBackend
    return kind(groups, kv, device=options.device, **limits)


def launch_nothing(runner: ModelRunner) -> None:
    assert runner.graph_runner is not None
    for graph in runner.graph_runner.graphs.values():
        graph._step = lambda: None  # type: ignore[attr-defined]


# --- measuring ---------------------------------------------------------------------------------


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
    assert graphs is not None and graphs._steps is not None
    steps = graphs._steps
    batch = timed(samples["build_batch"], lambda: requests.step(size))
    timed(samples["choose"], lambda: graphs.plan(size))
    named = steps.named_static_tensors
    timed(samples["addresses"], lambda: all(map(is_, steps.static_parts(), steps._seen)))
    late = runner.attn_backend.looks_up_past_only
    timed(samples["page_table"], runner.kv.flush_urgent if late else runner.kv.flush)
    timed(samples["inputs_and_plan"], lambda: steps.prepare(batch, size, graph_follows=True))
    timed(samples["launch"], graphs.graphs[size].replay)
    graphs.buffers.handover.note_launch()
    timed(samples["settle"], steps.settle)
    timed(samples["confirm"], lambda: steps._addresses.check(steps._seen, named))
    timed(samples["inputs_alone"], lambda: graphs.buffers.populate(batch, graph_follows=True))
    graphs.buffers.handover.take_back()
    steps.settle()  # or the next step would do it, while it is timed


def timed(samples: list[float], part: Callable[[], Any]) -> Any:
    started = time.perf_counter_ns()
    result = part()
    samples.append((time.perf_counter_ns() - started) / 1e3)
    return result


_other_memory = np.zeros(COLD_BYTES // 8)


def synchronize(runner: ModelRunner) -> None:
    if runner.device.type == "cuda":
        torch.cuda.synchronize()
    else:
        _other_memory.sum()


if __name__ == "__main__":
    main()
