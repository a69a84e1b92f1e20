"""The grid of context lengths on which step times and batch histograms are kept."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Cells are this many tokens wide at first, and then grow with the context: 3% of it at most.
_FIRST_WIDTH = 16
_GROWTH = 0.03
#: Upper edge of the last cell.
_NO_LIMIT = 1 << 40


@dataclass(frozen=True)
class ContextGrid:
    """Cells of the mean context of a decode batch: its KV tokens over its batch size.

    A step costs the same anywhere in a cell, which is what lets a simulation take a run of steps at
    once. In a cell at most 3% wide, the part of a step that reads the KV cache is off by 1.5% at most,
    and by nothing on average.
    """

    #: `[num_cells + 1]` int64, from 0, increasing; a cell holds its lower edge. The last edge is no limit.
    edges: NDArray[np.int64]
    #: `[num_cells]` float64: the context for which a cell's cost is taken.
    middles: NDArray[np.float64]

    @classmethod
    def up_to(cls, max_seq_len: int) -> ContextGrid:
        """Return the grid for requests of up to `max_seq_len` tokens."""
        edges = [0]
        while edges[-1] <= max_seq_len:
            edges.append(edges[-1] + max(_FIRST_WIDTH, int(edges[-1] * _GROWTH)))
        # The contexts of a cell are whole numbers: 0 .. 15 has its middle at 7.5.
        middles = (np.array(edges[:-1]) + np.minimum(edges[1:], max_seq_len + 1) - 1) / 2
        edges[-1] = _NO_LIMIT
        return cls(np.array(edges, dtype=np.int64), middles)

    @cached_property
    def num_cells(self) -> int:
        return len(self.middles)

    def cell(self, num_kv_tokens: int, batch_size: int) -> int:
        """The cell of a step that attends to `num_kv_tokens` tokens in `batch_size` requests."""
        return int(np.searchsorted(self.edges, num_kv_tokens // batch_size, side="right")) - 1
