"""Which kernels a decode step launches: `python -m tests.bench.bench_decode_kernels [OVERRIDE ...]`.

Builds the model of the composed configuration, runs one eager decode step at a batch size under
torch's profiler, and prints one JSON object: launches in all and a layer, and each kernel with its
launches and its microseconds, the most frequent first. A graph's device memory grows with its nodes.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from harness.build import model_spec, runner_config
from harness.compose import compose
from harness.device import resolve_device
from harness.probe import ProbeRequests
from harness.schema import load_config
from runners.model_runner import ModelRunner
from runners.models.loader import load_model

BATCH_SIZE = 32
CONTEXT_LEN = 512


def main() -> None:
    config = load_config(compose([*sys.argv[1:], "runner=eager", "runner.max_batch_size=32"]))
    device = resolve_device(config.device)
    loaded = load_model(model_spec(config), device)
    with ModelRunner(loaded, runner_config(config, device)) as runner:
        length = min(CONTEXT_LEN, config.model.max_seq_len)
        with ProbeRequests(runner, [length] * BATCH_SIZE, config.seed) as probe:
            batch = probe.decode_batch(BATCH_SIZE)
            for _ in range(3):
                runner.forward(batch)
            kernels = profiled(lambda: runner.forward(batch))
    launches = sum(kernel["launches"] for kernel in kernels)
    report = {
        "model": config.model.name,
        "batch_size": BATCH_SIZE,
        "context_len": length,
        "num_layers": loaded.num_layers,
        "launches": launches,
        "launches_per_layer": round(launches / loaded.num_layers, 1),
        "device_us": round(sum(kernel["us"] for kernel in kernels), 1),
        "kernels": kernels,
    }
    print(json.dumps(report), flush=True)


def profiled(step: Any) -> list[dict[str, Any]]:
    """Return name, launches and total µs of each kernel of `step`; on a CPU its operators."""
    on_cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities) as profiler:
        step()
        if on_cuda:
            torch.cuda.synchronize()
    wanted = torch.autograd.DeviceType.CUDA if on_cuda else torch.autograd.DeviceType.CPU
    totals: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in profiler.events():
        if event.device_type == wanted:
            totals[event.name][0] += 1
            totals[event.name][1] += event.device_time if on_cuda else event.cpu_time
    ranked = sorted(totals.items(), key=lambda item: -item[1][0])
    return [{"name": name[:160], "launches": int(count), "us": round(us, 1)} for name, (count, us) in ranked]


if __name__ == "__main__":
    main()
