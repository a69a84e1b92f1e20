"""Memory of a job: the budget before anything is built, and what the process held afterwards."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from harness.errors import ConfigError

if TYPE_CHECKING:
    from runners.model_runner import RunnerConfig
    from runners.models.loader import LoadedModel

MIB = 1024**2
#: Attention workspaces, cuBLAS workspaces and loaded kernels of a CUDA process, beside weights and cache.
_CUDA_OVERHEAD_BYTES = 1024 * MIB


@dataclass(frozen=True)
class MemoryBudget:
    """What a job will hold, in bytes, estimated before the cache is allocated."""

    weight_bytes: int
    kv_bytes: int
    logits_bytes: int
    overhead_bytes: int
    free_bytes: int

    @property
    def needed_bytes(self) -> int:
        """Bytes still to be allocated once the weights are there."""
        return self.kv_bytes + self.logits_bytes + self.overhead_bytes

    def check(self) -> None:
        """Raise `ConfigError` if the job will not fit."""
        if self.needed_bytes <= self.free_bytes:
            return
        raise ConfigError(
            "runner.max_batch_size",
            "",
            f"the KV pool ({self.kv_bytes / MIB:,.0f} MiB), logits ({self.logits_bytes / MIB:,.0f} MiB) and "
            f"workspaces ({self.overhead_bytes / MIB:,.0f} MiB) need {self.needed_bytes / MIB:,.0f} MiB but "
            f"{self.free_bytes / MIB:,.0f} MiB are free; lower runner.max_batch_size, model.max_seq_len or "
            "attention.num_pages",
        )


def kv_bytes_per_token(loaded: LoadedModel, kv_dtype: torch.dtype) -> int:
    """Return the bytes that one token's keys and values take over all layers."""
    groups = (loaded.groups[group_id] for group_id in loaded.layers)
    return sum(2 * g.num_kv_heads * g.head_dim * kv_dtype.itemsize for g in groups)


def plan_memory(loaded: LoadedModel, config: RunnerConfig, device: torch.device) -> MemoryBudget:
    """Estimate a job's memory on `device`; the weights are already loaded."""
    on_cuda = device.type == "cuda"
    return MemoryBudget(
        weight_bytes=loaded.weight_bytes,
        kv_bytes=config.num_kv_pages
        * config.page_size
        * kv_bytes_per_token(loaded, config.kv_dtype(loaded.dtype)),
        # The graphs' shared output, a split's copy of it and the eager step's own.
        logits_bytes=3 * config.max_batch_size * loaded.vocab_size * loaded.dtype.itemsize,
        overhead_bytes=_CUDA_OVERHEAD_BYTES if on_cuda else 0,
        free_bytes=torch.cuda.mem_get_info(device)[0] if on_cuda else _free_host_bytes(),
    )


def _free_host_bytes() -> int:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return sys.maxsize


def describe_memory(device: torch.device) -> dict[str, Any]:
    """Return what the process holds now, in bytes; the CUDA entries are None on a CPU."""
    peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    info: dict[str, Any] = {
        "host_peak_rss_bytes": peak_rss,
        "torch_allocated_bytes": None,
        "torch_reserved_bytes": None,
        "torch_peak_allocated_bytes": None,
        "device_free_bytes": None,
    }
    if device.type == "cuda":
        info |= {
            "torch_allocated_bytes": torch.cuda.memory_allocated(device),
            "torch_reserved_bytes": torch.cuda.memory_reserved(device),
            "torch_peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
            "device_free_bytes": torch.cuda.mem_get_info(device)[0],
        }
    return info
