"""The NVIDIA GPUs that this process may use, asked of the driver: no torch, no CUDA context."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec


@dataclass(frozen=True)
class Gpu:
    """One visible GPU."""

    name: str
    total_bytes: int
    used_bytes: int
    compute_capability: tuple[int, int]


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that `CUDA_VISIBLE_DEVICES` leaves, in CUDA's order as far as that list says it.

    Empty without a driver, or without the package nvidia-ml-py. Entries that name no GPU end the list, as they do in CUDA.
    """
    if find_spec("pynvml") is None:
        return []
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
        return [_describe(handles[index]) for index in _chosen(uuids)]
    finally:
        pynvml.nvmlShutdown()


def driver_version() -> str | None:
    """Return the driver's version, or None without a driver or without the package nvidia-ml-py."""
    if find_spec("pynvml") is None:
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _chosen(uuids: list[str]) -> list[int]:
    listing = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listing is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for entry in (part.strip() for part in listing.split(",")):
        index = _index(entry, uuids)
        if index is None:
            break
        chosen.append(index)
    return chosen


def _index(entry: str, uuids: list[str]) -> int | None:
    if entry.isdigit():
        return int(entry) if int(entry) < len(uuids) else None
    matches = [index for index, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
    return matches[0] if matches else None


def _describe(handle: object) -> Gpu:
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        str(pynvml.nvmlDeviceGetName(handle)), int(memory.total), int(memory.used), (int(major), int(minor))
    )
