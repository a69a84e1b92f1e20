"""A recorded job as `run_job` leaves it, written through JobRecord without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.config_hash import config_hash
from harness.record import JobRecord, Status

CAPTURE_SIZES = (1, 2, 4, 8)
NUM_STEPS = 40

CONFIG: dict[str, Any] = {
    "device": "cpu",
    "seed": 0,
    "output_dir": "outputs/job",
    "model": {
        "name": "tiny",
        "source": "random",
        "path": None,
        "config": {"num_hidden_layers": 2, "rope": {"a": 1}},
    },
    "attention": {"backend": "torch", "page_size": 16},
    "runner": {"kind": "cuda_graph", "max_batch_size": 8, "above_max": "eager"},
    "capture": {"policy": "explicit", "sizes": list(CAPTURE_SIZES)},
    "padding": {"strategy": "nearest", "costs_path": None},
    "compile": {"mode": "none"},
    "workload": {"kind": "synthetic", "prompt_len": {"distribution": "uniform", "min": 8, "max": 64}},
    "measure": {"context_lens": [128]},
    "parity": {"enabled": True},
    "tracking": {
        "mode": "offline",
        "project": "tests",
        "entity": None,
        "group": None,
        "tags": ["mine"],
        "dir": None,
    },
    "job": {"timeout_s": None},
    "sweep": {"id": "sweep-7"},
}
ENVIRONMENT: dict[str, Any] = {
    "python": "3.11.7",
    "device": "cpu",
    "device_name": None,
    "versions": {"torch": "2.13.0"},
    "command": ["harness", "capture=explicit"],
}
BENCH_SERVE: dict[str, Any] = {
    "duration": 2.5,
    "completed": 20,
    "total_input_tokens": 640,
    "total_output_tokens": 320,
    "request_throughput": 8.0,
    "output_throughput": 128.0,
    "mean_ttft_ms": 12.5,
    "median_ttft_ms": 11.0,
    "p99_ttft_ms": 30.0,
    "mean_tpot_ms": 4.5,
    "median_tpot_ms": 4.25,
    "p99_tpot_ms": 9.0,
    "mean_itl_ms": 4.5,
    "median_itl_ms": 4.0,
    "p99_itl_ms": 10.0,
    "mean_e2el_ms": 80.0,
    "median_e2el_ms": 75.0,
    "p99_e2el_ms": 120.0,
    "request_goodput": None,
}


def with_tracking(**changes: Any) -> dict[str, Any]:
    """The configuration with other tracking fields."""
    return CONFIG | {"tracking": CONFIG["tracking"] | changes}


def write_job(
    job_dir: Path,
    *,
    status: Status = Status.OK,
    config: dict[str, Any] = CONFIG,
    graph_backend: str = "emulated",
    verified: bool = True,
    num_steps: int = NUM_STEPS,
    finish: bool = True,
) -> JobRecord:
    """Record a job with every stream; with `finish=False` the rows stay in the parts, as after a kill."""
    record = JobRecord(job_dir)
    record.update(config=config, config_hash=config_hash(config, ENVIRONMENT), environment=ENVIRONMENT)
    record.update(model={"num_params": 1000, "weight_bytes": 4000}, graph_backend=graph_backend)
    record.append_many("capture", [capture_row(size, graph_backend) for size in reversed(CAPTURE_SIZES)])
    record.update(capture={"sizes": list(CAPTURE_SIZES)})
    record.update(parity={"verified": verified, "max_abs_error": 0.0 if verified else 1.5, "num_cases": 6})
    for batch_size in (1, 3, 8):
        record.append_many(
            "sizes", [sizes_row(batch_size, mode, graph_backend) for mode in ("graph", "eager")]
        )
        record.append("samples", {"batch_size": batch_size, "mode": "graph", "sample": 0, "step_ms": 1.5})
    record.append("prefill", {"num_tokens": 64, "context_len": 64, "step_ms_p50": 8.0, "num_samples": 20})
    record.append("ragged", {"batch_size": 4, "place": "first", "longest_len": 512, "replay_ms_p50": 1.4})
    record.append("loop", {"moment": "before", "phase": "decode", "batch_size": 4, "host_ms_mean": 0.3})
    for step in range(num_steps):
        record.append("steps", step_row(step))
    record.append_many(
        "profile",
        [profile_row(size, name, graph_backend) for size in (1, 8) for name in ("gemm", "attention")],
    )
    record.update(
        profile={"context_len": 128, "num_steps": 5, "graphs": [profile_shape(1), profile_shape(8)]}
    )
    for request_id in range(20):
        record.append("requests", request_row(request_id))
    if finish:
        record.finish_all()
        record.write_bench_serve(BENCH_SERVE, graph_backend)
        record.update(status=status)
    record.close()
    return record


def capture_row(capture_size: int, graph_backend: str) -> dict[str, Any]:
    return {
        "capture_size": capture_size,
        "graph_backend": graph_backend,
        "compiled": False,
        "compile_s": None,
        "warmup_s": 0.02,
        "capture_s": 0.01 * capture_size,
        "pool_bytes": 4096 * capture_size,
        "torch_bytes": 512,
        "device_bytes": None,
        "pinned_bytes": 64,
        "num_nodes": None,
    }


def sizes_row(batch_size: int, mode: str, graph_backend: str) -> dict[str, Any]:
    return {
        "batch_size": batch_size,
        "padded_batch_size": {1: 1, 3: 4, 8: 8}[batch_size] if mode == "graph" else batch_size,
        "mode": mode,
        "graph_backend": graph_backend if mode == "graph" else "none",
        "compiled": False,
        "context_len": 128,
        "num_kv_tokens": 128 * batch_size,
        "num_samples": 20,
        "num_discarded": 0,
        "host_prepare_us_p50": 55.0,
        "replay_ms_p50": 1.25 if mode == "graph" else None,
        "step_ms_p50": 1.5 if mode == "graph" else 3.0 + batch_size,
        "step_ms_p99": 2.0,
        "rel_std": 0.02,
        "rel_iqr": 0.01,
        "roofline_fraction": 0.25,
        "unmet_condition": None,
    }


def profile_row(batch_size: int, name: str, graph_backend: str) -> dict[str, Any]:
    time_us = {"gemm": 600.0, "attention": 200.0}[name]
    point = {"batch_size": batch_size, "mode": "graph", "graph_backend": graph_backend}
    found = {"kind": "kernel", "in_graph": True, "name": f"void {name}<bf16, {batch_size}>(int)"}
    return point | found | {"num_calls": 28.0, "time_us": time_us, "share": time_us / 800}


def profile_shape(batch_size: int) -> dict[str, Any]:
    return {
        "batch_size": batch_size,
        "mode": "graph",
        "graph_backend": "cuda",
        "num_kernels": 56,
        "num_outside": 3,
        "kernel_us": 800.0,
        "busy_us": 790.0,
        "span_us": 900.0,
        "gap_us": 110.0,
        "longest_gap_us": 4.5,
    }


def step_row(step: int) -> dict[str, Any]:
    """A quarter of the steps is prefill; of the decodes, one in three is above the largest graph."""
    is_prefill, is_above = step % 4 == 0, step % 4 == 3
    mode = "eager" if is_prefill or is_above else "graph"
    batch_size = 12 if is_above else 3
    return {
        "step": step,
        "clock_ms": 2.0 * step,
        "phase": "prefill" if is_prefill else "decode",
        "mode": mode,
        "reason": "prefill" if is_prefill else "above_max" if is_above else "padded",
        "batch_size": 1 if is_prefill else batch_size,
        "padded_batch_size": 1 if is_prefill else 12 if is_above else 4,
        "num_graphs": int(mode == "graph"),
        "num_tokens": 64 if is_prefill else batch_size,
        "num_kv_tokens": 300 + step,
        "host_prepare_us": 50.0,
        "host_exposed_us": None,
        "replay_ms": 1.25 if mode == "graph" else None,
        "step_ms": 2.0,
        "throttled": None,
    }


def request_row(request_id: int) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "arrival_s": 0.1 * request_id,
        "sent_s": 0.1 * request_id,
        "prompt_len": 32,
        "output_len": 16 if request_id else 1,
        "ttft_ms": 12.5,
        "tpot_ms": 4.5 if request_id else None,
        "e2el_ms": 80.0,
        "num_preemptions": 0,
        "status": "ok",
    }
