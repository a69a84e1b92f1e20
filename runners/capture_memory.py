"""Device and pinned memory by class, as far as torch and the driver can tell."""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass
from typing import Any

import torch

from runners.graph_pool import PoolHandle


@dataclass(frozen=True)
class MemoryReading:
    """Bytes by memory class; None where nothing measured it."""

    #: The graphs' private pool.
    pool_bytes: int | None = None
    #: Other bytes held by torch.
    torch_bytes: int | None = None
    #: Gone from the device but unknown to torch; None when another process holds the GPU.
    device_bytes: int | None = None
    #: Pinned host memory.
    pinned_bytes: int | None = None

    def since(self, earlier: MemoryReading) -> MemoryReading:
        """Return the growth by class; None where either side was not measured."""
        pairs = zip(astuple(self), astuple(earlier), strict=True)
        return MemoryReading(*(None if None in pair else pair[0] - pair[1] for pair in pairs))

    def plus(self, other: MemoryReading) -> MemoryReading:
        """Return the sum by class; None where either side was not measured."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return MemoryReading(*(None if None in pair else pair[0] + pair[1] for pair in pairs))


def read_memory(device: torch.device, pool: PoolHandle | None) -> MemoryReading:
    """Read the memory classes now; on a CUDA device, waits for it and returns cached blocks first.

    Without a pool of ours its bytes are None, and Inductor's own pool counts as torch's.
    """
    if device.type != "cuda":
        return MemoryReading()
    torch.cuda.synchronize(device)
    # Blocks that the warm-up cached would count as held, although the next allocation reuses them.
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved(device)
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()
    in_pool = sum(
        segment["total_size"]
        for segment in segments
        if pool is not None
        and tuple(segment["segment_pool_id"]) == tuple(pool)
        and segment["device"] == device.index
    )
    free, total = torch.cuda.mem_get_info(device)
    device_bytes = total - free - reserved if _is_alone(device) else None
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current")
    return MemoryReading(None if pool is None else in_pool, reserved - in_pool, device_bytes, pinned)


def _is_alone(device: torch.device) -> bool:
    """True if no other process holds the GPU. False as well if the driver does not say."""
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except Exception:
        return False
    # In a container the driver reports process ids of the host, so a single one is taken as ours.
    return len(processes) <= 1 or all(process.pid == os.getpid() for process in processes)
