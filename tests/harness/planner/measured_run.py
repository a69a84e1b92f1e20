"""A recorded run with made costs, as a GPU job would leave it: a stepped, not monotone step time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.record import JobRecord, Status
from harness.workload.base import Workload
from tests.harness.job_folder import CONFIG, ENVIRONMENT

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64)
CONTEXTS = (64, 512, 2048)
MAX_BATCH_SIZE = 64


def graph_ms(size: int, num_kv_tokens: float) -> float:
    """Weights, a staircase of tiles of 16 rows, and the cache that is read."""
    return 4.0 + 0.5 * -(-size // 16) + 0.01 * size + 2e-5 * num_kv_tokens


def eager_ms(size: int, num_kv_tokens: float) -> float:
    return 11.0 + 0.01 * size + 2e-5 * num_kv_tokens


def prefill_ms(num_tokens: int) -> float:
    return 5.0 + 0.02 * num_tokens


def poisson(num_requests: int, rate: float) -> Workload:
    """Requests of 300 and about 100 tokens, at `rate` a second."""
    rng = np.random.default_rng(0)
    return Workload(
        np.cumsum(rng.exponential(1 / rate, num_requests)),
        np.full(num_requests, 300, dtype=np.int32),
        rng.integers(50, 150, num_requests, dtype=np.int32),
    )


def write_run(
    job_dir: Path,
    *,
    sizes: Sequence[int] = SIZES,
    max_batch_size: int = MAX_BATCH_SIZE,
    graph_backend: str = "cuda",
    verified: bool = True,
    rel_std: float = 0.01,
    finish: bool = True,
) -> Path:
    """Record a size sweep, prefill times and captures; no workload."""
    record = JobRecord(job_dir)
    runner = {
        "kind": "cuda_graph",
        "max_batch_size": max_batch_size,
        "above_max": "eager",
        "on_miss": "eager",
        "prefill_chunk_tokens": 512,
    }
    config = CONFIG | {
        "model": {"name": "made", "max_seq_len": 4096},
        "attention": {"page_size": 16, "num_pages": None},
        "runner": runner,
        "capture": {"policy": "explicit", "sizes": list(sizes), "plan_path": None},
    }
    record.update(config=config, environment=ENVIRONMENT, model={"name": "made"}, graph_backend=graph_backend)
    record.append_many("capture", [capture_row(size, max(sizes), graph_backend) for size in reversed(sizes)])
    record.update(capture={"sizes": list(sizes)}, parity={"verified": verified})
    for context in CONTEXTS:
        for size in sizes:
            for mode in ("graph", "eager"):
                record.append("sizes", sizes_row(size, context, mode, graph_backend, rel_std))
    for tokens in (16, 128, 512):
        row = {
            "num_tokens": tokens,
            "context_len": tokens,
            "step_ms_p50": prefill_ms(tokens),
            "num_samples": 20,
        }
        record.append("prefill", row)
    record.update(size_sweep={"kv_bytes_per_token": 4096})
    if finish:
        record.finish_all()
        record.update(status=Status.OK)
    record.close()
    return job_dir


def sizes_row(
    size: int, context: int, mode: str, graph_backend: str, rel_std: float = 0.01
) -> dict[str, Any]:
    tokens = size * context
    return {
        "batch_size": size,
        "padded_batch_size": size,
        "mode": mode,
        "graph_backend": graph_backend if mode == "graph" else "none",
        "compiled": False,
        "context_len": context,
        "num_kv_tokens": tokens,
        "num_samples": 100,
        "num_discarded": 0,
        "step_ms_p50": graph_ms(size, tokens) if mode == "graph" else eager_ms(size, tokens),
        "rel_std": rel_std,
        "rel_iqr": rel_std,
    }


def capture_row(size: int, largest: int, graph_backend: str) -> dict[str, Any]:
    """The first capture, the largest, bears the pool."""
    return {
        "capture_size": size,
        "graph_backend": graph_backend,
        "compiled": False,
        "compile_s": None,
        "warmup_s": 0.05,
        "capture_s": 0.1,
        "pool_bytes": (64 << 20) if size == largest else (1 << 20),
        "torch_bytes": 0,
        "device_bytes": 8 << 20,
        "pinned_bytes": 4096,
        "num_nodes": 100,
    }
