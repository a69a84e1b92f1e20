"""A sweep as the application leaves it: a folder a job, and sweep.csv."""

from __future__ import annotations

from itertools import islice, product
from pathlib import Path

from harness.record import Status
from harness.sweep import Point, SweepFolder, row_of
from tests.harness.job_folder import BENCH_SERVE, CONFIG, write_job

POLICIES = ("vllm", "sglang", "all", "powers_of_two", "max_only")
PADDINGS = ("nearest", "split", "cheapest", "exact")
SEEDS = range(10)


def write_sweep(
    folder: Path,
    num_jobs: int = 6,
    *,
    graph_backend: str = "cuda",
    failed: tuple[int, ...] = (),
    num_steps: int = 40,
) -> Path:
    """Record `num_jobs` jobs that vary capture list, padding and seed; those in `failed` ran out of memory."""
    folder.mkdir(parents=True, exist_ok=True)
    sweep = SweepFolder(folder)
    for index, (seed, padding, policy) in enumerate(islice(product(SEEDS, PADDINGS, POLICIES), num_jobs)):
        job_dir = folder / str(index)
        config = CONFIG | {
            "seed": seed,
            "padding": {"strategy": padding},
            "capture": {"policy": policy, "sizes": []},
        }
        with write_job(job_dir, config=config, graph_backend=graph_backend, num_steps=num_steps) as record:
            summary = BENCH_SERVE | {"median_tpot_ms": 4.0 + 0.1 * (index % 7)}
            record.write_bench_serve(summary, graph_backend)
            if index in failed:
                error = {"kind": "CaptureOutOfMemoryError", "message": "300 MiB short at size 112"}
                record.update(status=Status.CAPTURE_OOM, error=error)
        row = row_of(job_dir, f"capture={policy} padding={padding} seed={seed}", 60.0)
        sweep.put(job_dir, Point(index, None, "", row))
    return folder
