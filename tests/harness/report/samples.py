"""Jobs that recorded samples: the size sweep of a GPU that never was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.record import JobRecord, Status
from tests.harness.job_folder import CONFIG, ENVIRONMENT, sizes_row

GPU: dict[str, Any] = ENVIRONMENT | {
    "device": "cuda:0",
    "device_name": "NVIDIA H200",
    "driver": "595.1",
    "cuda": "13.0",
}
MODEL: dict[str, Any] = {"name": "tiny", "model_type": "qwen3", "num_params": 1000, "dtype": "bfloat16"}
BATCH_SIZES = (1, 2, 4, 8)


def series(level_ms: float, seed: int, noise: float = 0.01, num_samples: int = 40) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    result: NDArray[np.float64] = level_ms * np.exp(noise * rng.normal(size=num_samples))
    return result


def write_samples(
    job_dir: Path,
    *,
    slow_down: float = 0.0,
    seed: int = 0,
    noise: float = 0.01,
    environment: dict[str, Any] = GPU,
    model: dict[str, Any] = MODEL,
    config: dict[str, Any] = CONFIG,
    graph_backend: str = "cuda",
    verified: bool = True,
    batch_sizes: tuple[int, ...] = BATCH_SIZES,
) -> Path:
    """Record a size sweep, graph and eager; graphs take `slow_down` (a share) longer than 1 ms + 0.1 a row."""
    with JobRecord(job_dir) as record:
        record.update(config=config, config_hash="0", environment=environment, model=model)
        record.update(graph_backend=graph_backend, parity={"verified": verified, "num_cases": 4})
        for index, batch_size in enumerate(batch_sizes):
            for mode, level_ms in (("graph", (1 + 0.1 * batch_size) * (1 + slow_down)), ("eager", 5.0)):
                step_ms = series(level_ms, 1000 * seed + 2 * index + (mode == "eager"), noise)
                _append(record, batch_size, mode, graph_backend, step_ms)
        record.finish_all()
        record.update(status=Status.OK)
    return job_dir


def _append(
    record: JobRecord, batch_size: int, mode: str, graph_backend: str, step_ms: NDArray[np.float64]
) -> None:
    backend = graph_backend if mode == "graph" else "none"
    point = {"batch_size": batch_size, "padded_batch_size": batch_size, "mode": mode, "context_len": 128}
    row = (
        sizes_row(8, mode, backend) | point | {"step_ms_p50": float(np.median(step_ms)), "replay_ms_p50": 0.9}
    )
    record.append("sizes", row)
    record.append_many(
        "samples",
        [point | {"timing": "isolated", "sample": i, "step_ms": float(ms)} for i, ms in enumerate(step_ms)],
    )
    record.append("samples", point | {"timing": "back_to_back", "sample": 0, "step_ms": 0.01})
