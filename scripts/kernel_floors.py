#!/usr/bin/env python3
"""Print, kernel by kernel, what a decode step of the fused layers takes and what memory allows, as Markdown.

    kernel_floors.py OUT.json [--models qwen3_0_6b qwen3_8b] [--batch-sizes 8 32] [--context 512]

A CUDA GPU is needed. The steps are replays under torch's profiler. What a kernel adds is the time from the end of
the kernel before to its own end: with programmatic dependent launch it starts before that, and waits. The floor is
the time to read its weight, or its layer's cache, once at the copy bandwidth measured in the same process.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from harness.build import model_spec, runner_config
from harness.compose import compose
from harness.device import describe_environment, measure_copy_bandwidth, resolve_device
from harness.host_clock import DeviceWork
from harness.probe import ProbeRequests
from harness.schema import load_config
from harness.step_profile import Kernel, kernels_by_step, profiled_steps
from runners.graph_backend import own_stream
from runners.model_runner import ModelRunner
from runners.models.loader import load_model
from runners.padding import StepPlan

#: In the order of a layer's kernels behind its attention; the last is the next layer's.
PRODUCTS = ("output", "gate_up", "down", "qkv")
_PRODUCT_NAMES = ("gemm", "gemv", "nvjet", "cutlass")


@dataclass
class KernelTime:
    """A kernel of a layer in the middle of the model, medians over layers and steps."""

    model: str
    batch_size: int
    part: str
    name: str
    calls: int
    added_us: float
    #: None for a kernel that reads neither a weight nor the cache.
    floor_us: float | None


def main() -> int:
    options = _parser().parse_args()
    device = resolve_device("cuda")
    bandwidth = measure_copy_bandwidth(device)
    assert bandwidth is not None, "too little memory is free"
    rows, steps = [], []
    for model in options.models:
        for batch_size, found in _profiled(model, options, device):
            steps.append({"model": model, "batch_size": batch_size, "span_us": median(map(_span_us, found))})
            rows += list(_layer(model, batch_size, found, options.context, bandwidth))
    content = {
        "command": ["python", "scripts/kernel_floors.py", *sys.argv[1:]],
        "environment": describe_environment(device),
        "copy_bandwidth_bytes_per_s": bandwidth,
        "steps": steps,
        "kernels": [asdict(row) for row in rows],
    }
    options.out.write_text(json.dumps(content, indent=1))
    print("\n".join(table(steps, rows)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="+", default=["qwen3_0_6b", "qwen3_8b"])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--context", type=int, default=512)
    return parser


def _profiled(
    model: str, options: argparse.Namespace, device: torch.device
) -> Iterator[tuple[int, list[list[Kernel]]]]:
    """Yield each batch size and the kernels of its replays."""
    sizes = sorted(options.batch_sizes)
    overrides = [
        *(f"model={model}", "model.implementation=fused", f"model.max_seq_len={2 * options.context}"),
        *("capture=explicit", f"capture.sizes={sizes}", f"runner.max_batch_size={sizes[-1]}", "device=cuda"),
    ]
    config = load_config(compose(overrides))
    with own_stream(device):
        loaded = load_model(model_spec(config), device)
        with ModelRunner(loaded, runner_config(config, device)) as runner:
            for size in sizes:
                with ProbeRequests(runner, [options.context] * size, seed=0) as probe:
                    events = profiled_steps(
                        runner, probe.decode_batch(size), StepPlan("graph", (size,), "forced")
                    )
                DeviceWork(device).read()
                yield (
                    size,
                    [[kernel for kernel in step if kernel.in_graph] for step in kernels_by_step(events)],
                )


def _span_us(step: Sequence[Kernel]) -> float:
    return step[-1].end_us - step[0].start_us


def _layer(
    model: str, batch_size: int, steps: Sequence[Sequence[Kernel]], context: int, bandwidth: float
) -> Iterator[KernelTime]:
    """Yield the kernels from one attention to the next, where most layers have the same."""
    layers = [layer for step in steps for layer in _layers(step)]
    names = max((tuple(kernel.name for kernel, _ in layer) for layer in layers), key=len)
    usual = [layer for layer in layers if tuple(kernel.name for kernel, _ in layer) == names]
    floors = _floor_bytes(model, batch_size, context)
    products = iter(PRODUCTS)
    for place, name in enumerate(names):
        part = "attention" if place == 0 else next(products) if _is_product(name) else "around"
        yield KernelTime(
            model,
            batch_size,
            part,
            name,
            len(usual) // len(steps) + 1,  # of the last layer, what follows is the head
            median(layer[place][1] for layer in usual),
            1e6 * floors[part] / bandwidth if part in floors else None,
        )


def _layers(step: Sequence[Kernel]) -> Iterator[list[tuple[Kernel, float]]]:
    """Yield the kernels between two attentions, the first included, each with the µs that it adds."""
    ends = sorted(step, key=lambda kernel: kernel.end_us)
    added = [(kernel, kernel.end_us - before.end_us) for before, kernel in pairwise(ends)]
    starts = [place for place, (kernel, _) in enumerate(added) if "attention" in kernel.name]
    for start, end in pairwise(starts):
        yield added[start:end]


def _is_product(name: str) -> bool:
    return any(part in name for part in _PRODUCT_NAMES)


def _floor_bytes(model: str, batch_size: int, context: int) -> dict[str, int]:
    """Return what each part of a layer must read, in bytes of bfloat16."""
    config = load_config(compose([f"model={model}"])).model.config
    heads, kv_heads, head_dim = (
        int(config[name]) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    hidden, intermediate = int(config["hidden_size"]), int(config["intermediate_size"])
    return {
        "attention": 2 * 2 * batch_size * context * kv_heads * head_dim,
        "output": 2 * hidden * heads * head_dim,
        "gate_up": 2 * 2 * hidden * intermediate,
        "down": 2 * hidden * intermediate,
        "qkv": 2 * hidden * (heads + 2 * kv_heads) * head_dim,
    }


def table(steps: Sequence[dict[str, Any]], rows: Sequence[KernelTime]) -> Iterator[str]:
    """Yield the lines of a table: µs a kernel and its floor, a column a model and batch size."""
    points = [(step["model"], step["batch_size"]) for step in steps]
    yield "| µs, of floor | " + " | ".join(f"{model}, batch {size}" for model, size in points) + " |"
    yield "|---" * (len(points) + 1) + "|"
    for part in ("attention", *PRODUCTS, "around"):
        cells = [
            _cell([row for row in rows if (row.model, row.batch_size, row.part) == (*point, part)])
            for point in points
        ]
        if any(cells):
            yield f"| {part} | " + " | ".join(cells) + " |"
    sums = [[row for row in rows if (row.model, row.batch_size) == point] for point in points]
    yield "| a layer | " + " | ".join(_cell(layer) for layer in sums) + " |"
    yield "| whole step, ms | " + " | ".join(f"{step['span_us'] / 1e3:.2f}" for step in steps) + " |"


def _cell(rows: Sequence[KernelTime]) -> str:
    if not rows:
        return ""
    floor = sum(row.floor_us or 0.0 for row in rows)
    return f"{sum(row.added_us for row in rows):.1f} of {floor:.1f}"


if __name__ == "__main__":
    sys.exit(main())
