"""What bringing a step's inputs to the device costs: `python -m tests.bench.bench_upload OUT.json`.

Needs a GPU. Rounds of steps back to back on one stream, the host ahead of the device, as a decode loop with
overlap runs them: write the inputs by one of the ways of `Upload` (or not at all), replay a graph of some
0.3 ms that reads them; or replay one that fetches them by itself (`graph`, see `Handover`). The ways take
turns, and a step's time is that of a round between two events over its number of steps, the median of the
rounds. Above the step without an upload stands the idle time that it brings, its own work included. `host_us`
is the median time of one call of `queue`, or of `hand_in`.

Prints a line for each number of requests and way, and writes all of it to OUT.json.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from harness.device import describe_environment
from runners.handover import Handover, create_handover
from runners.staging import CopyFences, Upload

#: Requests that the static inputs have rows for, 36 bytes each.
MAX_BATCH_SIZES = (8, 16, 32, 64, 128, 256)
ROW_BYTES = 36
WAYS = ("none", "copy", "kernel", "graph")
NUM_BUFFERS = 8
NUM_ROUNDS = 7
NUM_STEPS = 200
#: The graph: products of few rows, which read their weights from memory as a decode step does.
NUM_PRODUCTS, ROWS, WIDTH = 24, 8, 4096
#: Has the inputs of a turn brought to the device.
Way = Callable[[int], None]


def main(out: Path) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("bench_upload needs a CUDA device, and this torch sees none.")
    device = torch.device("cuda", torch.cuda.current_device())
    weights = [torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device=device) for _ in range(NUM_PRODUCTS)]
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, device=device)
    torch.cuda.synchronize()
    lines: list[dict[str, Any]] = []
    with torch.cuda.stream(torch.cuda.Stream(device)):
        for max_batch_size in MAX_BATCH_SIZES:
            lines += measure(max_batch_size, x, weights)
    report = {
        "command": ["python", "-m", "tests.bench.bench_upload", *sys.argv[1:]],
        "environment": describe_environment(device),
        "num_rounds": NUM_ROUNDS,
        "num_steps": NUM_STEPS,
        "lines": lines,
    }
    out.write_text(json.dumps(report, indent=1) + "\n")
    for line in lines:
        print(json.dumps({name: value for name, value in line.items() if name != "rounds_us"}), flush=True)


def measure(max_batch_size: int, x: torch.Tensor, weights: list[torch.Tensor]) -> list[dict[str, Any]]:
    """Time the ways in turn; return a line for each."""
    num_bytes = ROW_BYTES * max_batch_size
    target = torch.zeros(num_bytes, dtype=torch.uint8, device=x.device)
    handover = create_handover(target, NUM_BUFFERS, max_batch_size)
    if handover.way != "kernel":
        raise SystemExit(f"no graph fetches its inputs on this machine: they would come by {handover.way}.")
    ways: dict[str, Way | None] = {"none": None, "graph": handover.hand_in}
    for name in ("copy", "kernel"):
        uploads = [Upload(target, image, by_kernel=name == "kernel") for image in handover.images.unbind()]
        if uploads[0].way != name:
            raise SystemExit(f"no upload by {name} on this machine: it would be by {uploads[0].way}.")
        ways[name] = queueing(uploads)
    plain, fetching = captured(target, x, weights), captured(target, x, weights, handover)
    fences = CopyFences(NUM_BUFFERS, x.device)
    rounds: dict[str, list[float]] = {way: [] for way in WAYS}
    calls: dict[str, list[int]] = {way: [] for way in WAYS}
    for number in range(NUM_ROUNDS + 1):
        for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
            graph, seen = fetching if way == "graph" else plain
            step_us, call_ns = timed_round(ways[way], handover, graph, fences)
            check(way, seen)
            if number > 0:  # the first warms up
                rounds[way].append(step_us)
                calls[way] += call_ns
    without = statistics.median(rounds["none"])
    return [
        {
            "max_batch_size": max_batch_size,
            "num_bytes": num_bytes,
            "way": way,
            "step_us": round(statistics.median(rounds[way]), 2),
            "above_none_us": round(statistics.median(rounds[way]) - without, 2),
            "host_us": round(statistics.median(calls[way]) / 1e3, 2) if calls[way] else None,
            "rounds_us": [round(us, 2) for us in rounds[way]],
        }
        for way in WAYS
    ]


def queueing(uploads: list[Upload]) -> Way:
    return lambda turn: uploads[turn].queue()


def captured(
    target: torch.Tensor, x: torch.Tensor, weights: list[torch.Tensor], handover: Handover | None = None
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Return a graph that reads `target`, which it fetches with a `handover`, and computes; and what it has read."""
    seen = torch.zeros_like(target)
    for _ in range(2):  # what libraries do once is not for a capture
        torch.add(target, 0, out=seen)
        torch.mm(x, weights[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if handover is not None:
            handover.fetch()
        torch.add(target, 0, out=seen)
        for weight in weights:
            torch.mm(x, weight)
    return graph, seen


def timed_round(
    way: Way | None, handover: Handover, graph: torch.cuda.CUDAGraph, fences: CopyFences
) -> tuple[float, list[int]]:
    """Return the µs of one step of a round, and the ns of each call of `way`.

    Each step writes its number, modulo 251, to its image.
    """
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call_ns = []
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000)  # 2 ms, for the host to get ahead
    start.record()
    for step in range(NUM_STEPS):
        turn = fences.next_turn()
        handover.images[turn].fill_(step % 251)
        if way is not None:
            started = time.perf_counter_ns()
            way(turn)
            call_ns.append(time.perf_counter_ns() - started)
        graph.replay()
        handover.note_launch()
        fences.settle()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e3 / NUM_STEPS, call_ns


def check(way: str, seen: torch.Tensor) -> None:
    """The last step must have read what the host wrote for it."""
    if way != "none" and not bool((seen == (NUM_STEPS - 1) % 251).all()):
        raise SystemExit(f"the upload by {way} did not arrive: the last step read {seen.unique().tolist()}.")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
