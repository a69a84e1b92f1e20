"""What the planner promises of its speed, on one core.

    OMP_NUM_THREADS=1 python -m pytest tests/bench/bench_planner.py -s

10 million requests simulated in under 60 s, a list of 512 sizes chosen under any budget in under 1 s, and
1 GB of an engine's log read in under 60 s. CPU seconds are printed beside wall seconds: on a shared machine
the latter are longer. The first run also compiles the simulator.
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from harness.planner.contexts import ContextGrid
from harness.planner.optimise import Budget, optimise
from harness.planner.problem import CaptureProblem
from harness.planner.simulate import simulate
from harness.planner.step_times import StepTimes
from harness.scheduler import SchedulerLimits
from harness.workload.base import Workload
from harness.workload.engine_logs import load_engine_log
from runners.padding import StepPlan

MIB = 1024**2
LOG_MIB = 1024


def timed(what: str, work: Callable[[], object], limit_s: float) -> None:
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\n{what}: {wall:.2f} s wall, {cpu:.2f} s CPU, peak {peak_mib:.0f} MiB; {result}")
    assert cpu < limit_s


def made_times(max_batch_size: int, chunk: int, max_seq_len: int) -> StepTimes:
    """A step of 4 ms, 20 µs a request, 30 ns a token of cache, 700 ns one of the longest; 20 µs a prefill token."""
    grid = ContextGrid.up_to(max_seq_len)
    batch = np.arange(max_batch_size + 1)[:, None]
    decode_ns = (4e6 + 2e4 * batch + 30 * batch * grid.middles).astype(np.int64)
    prefill_ns = np.arange(chunk + 1) * 20_000 + 5_000_000
    plans = tuple(StepPlan("graph", (max_batch_size,)) for _ in range(max_batch_size + 1))
    return StepTimes(
        sizes=(max_batch_size,),
        plans=plans,
        decode_ns=decode_ns,
        excess_ns=700.0 / np.arange(1, max_batch_size + 2),
        after_prefill_ns=np.full(max_batch_size + 1, 300_000),
        prefill_ns=prefill_ns,
        pairs=np.array([0, 2048 * 2048, 2048 * 8192]),
        pairs_ns=np.array([0, 2_000_000, 8_000_000]),
        grid=grid,
    )


def requests(number: int, rate: float) -> Iterator[Workload]:
    """Poisson arrivals, log-normal lengths of about 800 and 120 tokens, a million at a time."""
    rng, start_s = np.random.default_rng(0), 0.0
    for _ in range(0, number, 1_000_000):
        count = min(number, 1_000_000)
        arrival_s = start_s + np.cumsum(rng.exponential(1 / rate, count))
        start_s = float(arrival_s[-1])
        prompt_len = rng.lognormal(np.log(800), 0.8, count).clip(1, 4000).astype(np.int32)
        output_len = rng.lognormal(np.log(120), 0.8, count).clip(1, 2000).astype(np.int32)
        yield Workload(arrival_s, prompt_len, output_len)


@pytest.mark.parametrize("rate", [5.0, 20.0, 60.0])
def test_ten_million_requests(rate: float) -> None:
    limits = SchedulerLimits(256, 200_000, 16, 2048, 8192)
    times = made_times(256, 2048, 8192)
    simulate(times, limits, requests(1000, rate))

    def run() -> str:
        result = simulate(times, limits, requests(10_000_000, rate))
        return f"{result.num_steps:,} steps, mean batch {result.mean_batch_size:.1f}"

    timed(f"10 million requests at {rate}/s", run, limit_s=60)


def problem(kind: str) -> CaptureProblem:
    """512 sizes with a noisy step time, and what they take: all alike, or at random."""
    rng, number = np.random.default_rng(3), 512
    size_ms = 4 + np.arange(1, number + 1) * 0.02 + rng.random(number) * (0.5 if kind == "rough" else 0.05)
    weight = np.exp(-0.5 * ((np.arange(1, number + 1) - 150) / 100) ** 2) * rng.random(number)
    cumulative = np.concatenate([[0.0], np.cumsum(weight)])
    arc_ms = (cumulative[1:, None] - cumulative[None, :]) * size_ms[:, None]
    arc_ms[np.arange(number + 1)[None, :] > np.arange(number)[:, None]] = np.inf
    added = np.full(number, 8.0) if kind == "alike" else rng.uniform(2, 12, number)
    return CaptureProblem(
        tuple(range(1, number + 1)),
        arc_ms,
        added * MIB,
        rng.uniform(0.05, 0.4, number),
        float(weight.sum()),
        np.ones(number, dtype=bool),
    )


@pytest.mark.parametrize("kind", ["alike", "smooth", "rough"])
@pytest.mark.parametrize(
    "budget",
    [
        Budget(),
        Budget(20),
        Budget(memory_mib=200),
        Budget(memory_mib=1000),
        Budget(capture_seconds=5),
        Budget(None, 200, 5),
        Budget(25, 200, 4),
        Budget(60, 300, 10),
    ],
)
def test_512_sizes(kind: str, budget: Budget) -> None:
    case = problem(kind)

    def run() -> str:
        choice = optimise(case, budget)
        return f"{choice.num_graphs} graphs, {choice.step_ms:.4f} ms, gap {choice.gap:.2%}"

    timed(f"512 sizes, {kind}, {budget}", run, limit_s=1)


def vllm_table() -> str:
    prefix = "(APIServer pid=66) INFO 09-02 08:46:23 [compilation/cuda_graph.py:123] "
    rows = ["| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |"]
    sizes = (random.randint(1, 200) for _ in range(20))
    rows += [f"| {size:<15} | {-(-size // 8) * 8:<13} | {0:<12} | FULL         | {40:<5} |" for size in sizes]
    return "".join(f"{prefix}{row}\n" for row in rows)


def vllm_stats() -> str:
    stats = [(size, 1000 + size, 4.0 + size * 0.01) for size in range(1, 300, 8)]
    words = "Batchsize forward time stats (batchsize, count, median_time(ms)): "
    return f"(EngineCore_DP0 pid=66) INFO 12-10 15:42:47 forward_context.py:58] {words}{stats}\n"


def sglang_line() -> str:
    size = random.randint(1, 200)
    return (
        f"[2026-10-01 11:53:31 TP0] Decode batch, #running-req: {size}, #token: {size * 900}, token usage: 0.05, "
        f"cuda graph: True, gen throughput (token/s): {size * 1000 / (5 + size * 0.02):.2f}, #queue-req: 0\n"
    )


def tensorrt_llm_stats() -> str:
    size = random.randint(1, 200)
    return (
        f'{{"iter": 3, "iterLatencyMS": {5 + size * 0.02:.3f}, "numActiveRequests": 5, "kvCacheStats": '
        f'{{"usedNumBlocks": 600, "tokensPerBlock": 64}}, "inflightBatchingStats": '
        f'{{"numContextRequests": 0, "numGenRequests": {size}, "numScheduledRequests": 5}}}}\n'
    )


@pytest.mark.parametrize(
    ("format_name", "made"),
    [
        ("vllm_log", vllm_table),
        ("vllm_log", vllm_stats),
        ("sglang_log", sglang_line),
        ("tensorrt_llm_stats", tensorrt_llm_stats),
    ],
)
def test_a_gigabyte_of_log(format_name: str, made: Callable[[], str], tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    piece = "".join(made() for _ in range(5000))
    with path.open("w") as file:
        for _ in range(-(-LOG_MIB * MIB // len(piece))):
            file.write(piece)

    def run() -> str:
        logged = load_engine_log(path, format_name)
        return f"{path.stat().st_size / MIB:.0f} MiB, {logged.num_used:,} lines used"

    try:
        timed(f"{format_name}, {made.__name__}", run, limit_s=60)
    finally:
        path.unlink()
