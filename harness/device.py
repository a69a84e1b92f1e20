"""The device that a job runs on: which one, what it is, and what it can move."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml

from harness.cache_flush import last_level_cache_bytes
from harness.errors import ConfigError
from harness.host_clock import Arrival, DeviceWork, Instant
from harness.memory import free_device_bytes
from harness.telemetry import Telemetry

_PACKAGES = (
    "torch", "transformers", "triton", "flashinfer-python", "hydra-core", "omegaconf", "wandb",
    "pandas", "pyarrow", "numpy", "cudagraph-harness",
)  # fmt: skip

#: Of each buffer of the copy that is timed: on a GPU with room for it, and on a CPU.
_COPY_BYTES, _CPU_COPY_BYTES = 2 * 1024**3, 128 * 1024**2
#: A smaller buffer than so many last-level caches would be copied within the cache.
_LEAST_CACHES = 4


def resolve_device(name: str) -> torch.device:
    """Turn `auto`, `cpu`, `cuda` or `cuda:N` into a device; refuse one that is not there.

    A CUDA device becomes the current one: events, streams and kernels of ours say no other.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if count else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        index = device.index or 0
        if index >= count:
            raise ConfigError(
                "device",
                name,
                f"this machine shows torch {count} CUDA device(s); use device=cpu, or device=auto",
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return what a reader needs to judge a figure: hardware, driver, versions, commit.

    Values that this machine does not tell are None.
    """
    info: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "num_cpus": os.cpu_count(),
        "torch_num_threads": torch.get_num_threads(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "git": _git_state(),
        "command": _command(),
        "device": str(device),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "device_vendor": "nvidia" if device.type == "cuda" and torch.version.cuda else None,
        "device_name": None,
        "driver": None,
        "cuda": torch.version.cuda,
        "world_size": 1,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        info |= {
            "device_name": properties.name,
            "device_memory_bytes": properties.total_memory,
            "num_multiprocessors": properties.multi_processor_count,
            "compute_capability": f"{properties.major}.{properties.minor}",
        }
        info |= Telemetry.of(device).describe()
    return info


def _command() -> list[str]:
    """The command line; of a sweep's job, which is started by its folder, the line that runs it alone."""
    program, *words = sys.argv
    overrides = Path(words[0], ".hydra", "overrides.yaml") if words else None
    if os.path.basename(program) == "isolation.py" and overrides is not None and overrides.exists():
        return ["harness", *yaml.safe_load(overrides.read_text())]
    return [os.path.basename(program or "python"), *words]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str | None:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(
                (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None
            )
    except OSError:
        return platform.processor() or None


def _git_state() -> dict[str, Any]:
    """Commit and dirty bit of the harness's own checkout; None outside one."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, timeout=5)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    status = git("status", "--porcelain", "--untracked-files=no") if commit else None
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def copy_buffer_bytes(free_bytes: int, cache_bytes: int) -> int | None:
    """Return the size of each of the two buffers of a copy whose bandwidth is the memory's, not the cache's.

    They take at most half of what is free. None if that leaves too little.
    """
    num_bytes = min(_COPY_BYTES, free_bytes // 4)
    return num_bytes if num_bytes >= _LEAST_CACHES * cache_bytes else None


def measure_copy_bandwidth(device: torch.device, min_time_s: float = 0.15) -> float | None:
    """Return the bandwidth of a large copy in bytes/s, bytes read plus bytes written.

    The best of the repeats is taken, since a roofline is a bound. None where a GPU has no room for buffers
    several times its cache. What it took of a GPU is given back, and left out of the peak.
    """
    num_bytes: int | None = _CPU_COPY_BYTES
    if device.type == "cuda":
        num_bytes = copy_buffer_bytes(free_device_bytes(device), last_level_cache_bytes(device))
    if num_bytes is None:
        return None
    bandwidth = 2 * num_bytes / _best_copy_s(device, num_bytes, min_time_s)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return bandwidth


def _best_copy_s(device: torch.device, num_bytes: int, min_time_s: float) -> float:
    source = torch.ones(num_bytes, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    work = DeviceWork(device)
    work.read()
    best_s, spent_s = float("inf"), 0.0
    while spent_s < min_time_s:
        start = Instant()
        target.copy_(source)
        elapsed_s = Arrival(work).ms_since(start) / 1e3
        best_s, spent_s = min(best_s, elapsed_s), spent_s + elapsed_s
    return best_s
