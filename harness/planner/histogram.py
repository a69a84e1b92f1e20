"""How often each decode batch ran, and with how many KV tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.planner.contexts import ContextGrid


@dataclass(frozen=True)
class BatchHistogram:
    """Weighted batches: `[num_entries]` each. The weights are step counts, or shares of them."""

    batch_size: NDArray[np.int64]
    num_kv_tokens: NDArray[np.float64]
    weight: NDArray[np.float64]
    #: By how many tokens the longest request of a batch exceeds their mean; None: all are alike.
    excess: NDArray[np.float64] | None = None

    @classmethod
    def from_counts(
        cls, counts: NDArray[np.int64], grid: ContextGrid, excess_tokens: NDArray[np.int64] | None = None
    ) -> BatchHistogram:
        """Read `counts` and `excess_tokens` of `[max_batch_size + 1, num_cells]`, as a simulation leaves them."""
        batch_size, cell = np.nonzero(counts)
        weight = counts[batch_size, cell].astype(np.float64)
        excess = None if excess_tokens is None else excess_tokens[batch_size, cell] / (weight * batch_size)
        return cls(batch_size, batch_size * grid.middles[cell], weight, excess)

    @property
    def total(self) -> float:
        return float(self.weight.sum())

    @property
    def max_batch_size(self) -> int:
        """The largest batch that ran; 0 if none did."""
        return int(self.batch_size.max(initial=0))

    @property
    def mean_context(self) -> float:
        """Mean KV tokens a request, over all requests of all steps."""
        rows = float((self.batch_size * self.weight).sum())
        return float((self.num_kv_tokens * self.weight).sum()) / rows if rows else 1.0

    def by_batch_size(self, max_batch_size: int) -> NDArray[np.float64]:
        """`[max_batch_size + 1]` summed weights."""
        counts = np.bincount(self.batch_size, self.weight, minlength=max_batch_size + 1)
        return counts.astype(np.float64)


def spread(max_batch_size: int, context: float) -> BatchHistogram:
    """Return all batches alike on a logarithmic scale of their size, of total weight 1, at one context.

    A histogram of the past has no weight where traffic may drift to; a plan for it alone leaves those
    batches to whatever graph comes next.
    """
    sizes = np.arange(1, max_batch_size + 1)
    weight = 1.0 / sizes.astype(np.float64)
    return BatchHistogram(sizes, sizes * np.float64(context), weight / weight.sum())
