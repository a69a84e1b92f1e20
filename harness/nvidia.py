"""The NVIDIA GPUs that this process may use, asked of the driver: no torch, no CUDA context."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any


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
    with _driver() as pynvml:
        if pynvml is None:
            return []
        handles = _handles(pynvml)
        uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
        return [_describe(handles[index]) for index in _chosen(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))]


def gpu_uuids(listing: str | None) -> list[str]:
    """Return the UUIDs of the GPUs that `listing` names, in the words of `CUDA_VISIBLE_DEVICES`; None: of all."""
    with _driver() as pynvml:
        if pynvml is None:
            return []
        uuids = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in _handles(pynvml)]
        return [uuids[index] for index in _chosen(uuids, listing)]


def driver_version() -> str | None:
    """Return the driver's version, or None without a driver or without the package nvidia-ml-py."""
    with _driver() as pynvml:
        return None if pynvml is None else str(pynvml.nvmlSystemGetDriverVersion())


@contextmanager
def _driver() -> Iterator[Any]:
    """Open NVML inside the block; None without a driver, or without the package."""
    if find_spec("pynvml") is None:
        yield None
        return
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _handles(pynvml: Any) -> list[Any]:
    return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]


def _chosen(uuids: list[str], listing: str | None) -> list[int]:
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
