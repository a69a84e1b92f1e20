"""The device that a job runs on: which one, what it is, what it can move, and whether it throttles."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from typing import Any

import torch

from harness.errors import ConfigError

_PACKAGES = (
    "torch", "transformers", "triton", "flashinfer-python", "hydra-core", "omegaconf", "wandb",
    "pandas", "pyarrow", "numpy", "cudagraph-harness",
)  # fmt: skip

#: NVML reasons that lower the clock because the card must, not because it idles or is told to.
_THROTTLE_REASONS = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}


def resolve_device(name: str) -> torch.device:
    """Turn `auto`, `cpu`, `cuda` or `cuda:N` into a device; refuse one that is not there."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda:0" if count else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        index = device.index or 0
        if index >= count:
            raise ConfigError(
                "device",
                name,
                f"this machine shows torch {count} CUDA device(s); use device=cpu, or device=auto",
            )
        return torch.device("cuda", index)
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
        "command": [os.path.basename(sys.argv[0] or "python"), *sys.argv[1:]],
        "device": str(device),
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
        info |= Telemetry(device).describe()
    return info


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


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_copy_bandwidth(device: torch.device, min_time_s: float = 0.15) -> float:
    """Return the bandwidth of a large copy in bytes/s, bytes read plus bytes written.

    The buffers are several times the last-level cache; the best of the repeats is taken, since a
    roofline is a bound.
    """
    num_bytes = 2 * 1024**3 if device.type == "cuda" else 128 * 1024**2
    source = torch.ones(num_bytes, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    synchronize(device)
    best, spent = float("inf"), 0.0
    while spent < min_time_s:
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        elapsed = time.perf_counter() - start
        best, spent = min(best, elapsed), spent + elapsed
    return 2 * num_bytes / best


class Telemetry:
    """Clocks, power and throttle reasons through NVML; every reading is None where there is none."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        if device.type != "cuda":
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(
                uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
            )
            self._nvml = pynvml
        except Exception:  # NVML is missing, or hides the card: readings stay None, which the record shows
            self._nvml = None

    def _read(self, name: str, *arguments: Any) -> Any:
        if self._nvml is None:
            return None
        try:
            return getattr(self._nvml, name)(self._handle, *arguments)
        except self._nvml.NVMLError:
            return None

    def describe(self) -> dict[str, Any]:
        """Return the facts that do not change during a job: driver, clock limits, other tenants."""
        if self._nvml is None:
            return {"driver": None}
        processes = self._read("nvmlDeviceGetComputeRunningProcesses") or []
        return {
            "driver": str(self._nvml.nvmlSystemGetDriverVersion()),
            "max_sm_clock_mhz": self._read("nvmlDeviceGetMaxClockInfo", self._nvml.NVML_CLOCK_SM),
            "num_other_gpu_processes": sum(p.pid != os.getpid() for p in processes),
        }

    def read(self) -> dict[str, Any]:
        """Return SM and memory clock (MHz), power (W), temperature (°C) and throttle reasons, now."""
        nvml = self._nvml
        if nvml is None:
            return {}
        power = self._read("nvmlDeviceGetPowerUsage")
        return {
            "sm_clock_mhz": self._read("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": self._read("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            "power_w": None if power is None else power / 1000,
            "temperature_c": self._read("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            "throttle_reasons": self.throttle_reasons(),
        }

    def throttle_reasons(self) -> list[str] | None:
        """Return why the card is held below its clock now; empty if it is not, None if unknown."""
        mask = self._read("nvmlDeviceGetCurrentClocksThrottleReasons")
        if mask is None:
            return None
        return [name for bit, name in _THROTTLE_REASONS.items() if mask & bit]

    def energy_mj(self) -> int | None:
        """Return the card's total energy counter in mJ, or None."""
        value = self._read("nvmlDeviceGetTotalEnergyConsumption")
        return None if value is None else int(value)
