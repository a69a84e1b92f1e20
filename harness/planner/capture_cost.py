"""What captured graphs cost besides time of a step: memory by class, and seconds at the start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Memory classes that lie on the device; pinned host memory is reported apart.
DEVICE_CLASSES = ("pool_bytes", "torch_bytes", "device_bytes")
#: What the driver takes for a graph's nodes, in blocks of 2 MiB: which size a new block falls to is an
#: accident of the order of capture. Over the records in docs/results the sum goes with the number of nodes.
_IN_BLOCKS = "device_bytes"
_CLASSES = (*DEVICE_CLASSES, "pinned_bytes")


@dataclass(frozen=True)
class CaptureCosts:
    """Costs by capture size, from `capture.csv`.

    Sizes are captured largest first into one pool, so the first row bears what is paid once (the pool of
    the largest batch, loading, tuning) and the others their own addition. A list is charged the first
    row once, for its largest size, and the addition of each other size; a size without a row takes what
    lies between its neighbours'. Additions below zero (another allocation was given back meanwhile)
    count as zero. The driver's blocks are shared by the nodes of all sizes but the largest.
    """

    #: `[num_sizes]` captured sizes below the largest, increasing.
    sizes: NDArray[np.float64]
    #: Memory class → `[num_sizes]` bytes added; a class that nobody measured is absent.
    added_bytes: dict[str, NDArray[np.float64]]
    added_seconds: NDArray[np.float64]
    first_bytes: dict[str, float]
    first_seconds: float
    is_known: bool = True

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]]) -> CaptureCosts | None:
        """Read the rows of `capture.csv`; None without any."""
        ordered = sorted(rows, key=lambda row: int(row["capture_size"]))
        if not ordered:
            return None
        *others, first = ordered
        others = others or [first]
        measured = [name for name in _CLASSES if all(row.get(name) is not None for row in ordered)]
        return cls(
            sizes=np.array([row["capture_size"] for row in others], dtype=np.float64),
            added_bytes={name: _added_bytes(others, name) for name in measured},
            added_seconds=np.array([_seconds(row) for row in others]),
            first_bytes={name: float(max(0, first[name])) for name in measured},
            first_seconds=_seconds(first),
        )

    @classmethod
    def unknown(cls) -> CaptureCosts:
        """Return the costs of captures that nobody measured."""
        return cls(np.ones(1), {}, np.zeros(1), {}, 0.0, is_known=False)

    @property
    def knows_memory(self) -> bool:
        """Whether the graphs' own memory was measured (it is not without CUDA)."""
        return "pool_bytes" in self.added_bytes

    @property
    def unknown_classes(self) -> list[str]:
        """Memory classes of the device that were not measured, and so are not in the sums."""
        return [name for name in DEVICE_CLASSES if name not in self.added_bytes]

    def device_bytes(self, sizes: Sequence[int]) -> NDArray[np.float64]:
        """`[len(sizes)]` bytes on the device that each size adds; the largest bears the first cost."""
        total = np.zeros(len(sizes))
        for name in DEVICE_CLASSES:
            if name in self.added_bytes:
                total += self._per_size(sizes, self.added_bytes[name], self.first_bytes[name])
        return total

    def seconds(self, sizes: Sequence[int]) -> NDArray[np.float64]:
        """`[len(sizes)]` seconds that the capture of each size takes, warm-up and compilation included."""
        return self._per_size(sizes, self.added_seconds, self.first_seconds)

    def by_class(self, sizes: Sequence[int]) -> dict[str, int]:
        """Bytes of a whole list by memory class."""
        return {
            name: round(self._per_size(sizes, values, self.first_bytes[name]).sum())
            for name, values in self.added_bytes.items()
        }

    def _per_size(
        self, sizes: Sequence[int], values: NDArray[np.float64], first: float
    ) -> NDArray[np.float64]:
        costs = np.interp(sizes, self.sizes, values)
        costs[int(np.argmax(sizes))] = first
        return costs


def _added_bytes(rows: Sequence[Mapping[str, Any]], name: str) -> NDArray[np.float64]:
    added = np.array([max(0, row[name]) for row in rows], dtype=np.float64)
    if name != _IN_BLOCKS:
        return added
    num_nodes = np.array([row.get("num_nodes") or 0 for row in rows], dtype=np.float64)
    shares = num_nodes if num_nodes.all() else np.ones(len(rows))
    spread: NDArray[np.float64] = added.sum() * shares / shares.sum()
    return spread


def _seconds(row: Mapping[str, Any]) -> float:
    return sum(float(row.get(name) or 0.0) for name in ("compile_s", "warmup_s", "capture_s"))
