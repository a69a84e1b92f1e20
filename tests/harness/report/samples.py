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
    replay_slow_down: float | None = None,
    back_to_back_slow_down: float = 0.0,
) -> Path:
    """Record a size sweep, graph and eager; graphs take `slow_down` (a share) longer than 1 ms + 0.1 a row.

    With `replay_slow_down` every step has a replay of that ratio to its undisturbed level.
    """
    with JobRecord(job_dir) as record:
        record.update(config=config, config_hash="0", environment=environment, model=model)
        record.update(graph_backend=graph_backend, parity={"verified": verified, "num_cases": 4})
        for index, batch_size in enumerate(batch_sizes):
            for mode, level_ms in (("graph", 1 + 0.1 * batch_size), ("eager", 5.0)):
                slower = 1 + slow_down if mode == "graph" else 1.0
                number = 1000 * seed + 2 * index + (mode == "eager")
                times = {"step_ms": series(level_ms * slower, number, noise)}
                if replay_slow_down is not None:
                    times["replay_ms"] = series(level_ms * (1 + replay_slow_down), number + 500, 0.003)
                in_a_row_ms = level_ms * (1 + back_to_back_slow_down)
                _append(record, batch_size, mode, graph_backend, times, in_a_row_ms)
        record.finish_all()
        record.update(status=Status.OK)
    return job_dir


def _append(
    record: JobRecord,
    batch_size: int,
    mode: str,
    graph_backend: str,
    times: dict[str, NDArray[np.float64]],
    in_a_row_ms: float,
) -> None:
    backend = graph_backend if mode == "graph" else "none"
    point = {"batch_size": batch_size, "padded_batch_size": batch_size, "mode": mode, "context_len": 128}
    medians = {"step_ms_p50": float(np.median(times["step_ms"])), "replay_ms_p50": 0.9}
    record.append("sizes", sizes_row(8, mode, backend) | point | medians)
    point["graph_backend"] = backend
    for sample, values in enumerate(zip(*times.values(), strict=True)):
        figures = dict(zip(times, map(float, values), strict=True))
        record.append("samples", point | {"timing": "isolated", "sample": sample} | figures)
    record.append("samples", point | {"timing": "back_to_back", "sample": 0, "step_ms": in_a_row_ms})
