"""Empties the last-level cache between samples, so that none finds what the one before left there."""

from __future__ import annotations

from pathlib import Path

import torch

_CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
#: Where the machine does not tell: more than most have.
_UNKNOWN_CACHE_BYTES = 64 * 1024**2
_UNITS = {"K": 1024, "M": 1024**2, "G": 1024**3}


class CacheFlush:
    """Writes a buffer of twice the last-level cache (a GPU's L2); holds the buffer as long as it lives."""

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = flush_bytes(device)
        self._buffer = torch.empty(self.num_bytes, dtype=torch.int8, device=device)

    def __call__(self) -> None:
        """Queue the write and return; whoever times a step waits for it first."""
        self._buffer.zero_()


def flush_bytes(device: torch.device) -> int:
    """Return the size of the buffer of a `CacheFlush`."""
    return 2 * last_level_cache_bytes(device)


def last_level_cache_bytes(device: torch.device) -> int:
    """Return the size of the device's largest cache."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [_bytes(path.read_text().strip()) for path in _CPU_CACHES.glob("index*/size")]
    return max(sizes, default=_UNKNOWN_CACHE_BYTES)


def _bytes(text: str) -> int:
    """`32K` → 32768, as the kernel writes cache sizes."""
    unit = _UNITS.get(text[-1:], 1)
    return int(text.rstrip("KMG")) * unit
