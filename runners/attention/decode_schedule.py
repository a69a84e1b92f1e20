"""What a FlashInfer decode plan wrote, and whether planning other page counts would write the same.

FlashInfer cuts each request's pages into chunks of one size, the smallest for which all chunks fit the
grid, and writes the list of (request, chunk) pairs; offsets and lengths come from the device
(flashinfer/attention/scheduler.cuh: `PartitionPagedKVCacheBinarySearchMinNumPagePerBatch`,
`PrefillBinarySearchKVChunkSize`; read in 0.7.4). So a plan still says the truth when every request has as many
chunks as before and a smaller chunk size would still not fit. Nothing here is taken on trust: a schedule is
only made from a plan if the arrays that the planner wrote are those that this rule says.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int32]
#: What a captured kernel was launched with: sizes, offsets and flags of the plan.
PlanLayout = tuple[int, ...]
#: `[batch_size]` each: the fewest pages of each request, and the most.
PageBounds = tuple[IntArray, IntArray]
_NO_BOUND = np.iinfo(np.int32).max


@dataclass(frozen=True)
class PlanArrays:
    """The parts of a plan that depend on page counts, as the planner wrote them."""

    #: False: one chunk a request, whatever its length; the kernel does not look at the chunk size.
    splits: bool
    #: Tokens a chunk.
    chunk_tokens: int
    #: `[batch_size + 1]`: request `i` has the chunks `offsets[i] : offsets[i + 1]`.
    offsets: IntArray


@dataclass(frozen=True)
class PlanFields:
    """Where a plan's layout says which kind it is, where its arrays lie, and how it tiles the queries."""

    length: int
    offsets: int
    chunk_tokens: int
    splits: int
    query_tile: int = 0


#: `DecodePlanInfo::ToVector` and `PrefillPlanInfo::ToVector` (scheduler.cuh).
DECODE_PLAN = PlanFields(length=10, offsets=5, chunk_tokens=7, splits=9)
TENSOR_CORE_PLAN = PlanFields(length=15, offsets=8, chunk_tokens=9, splits=14, query_tile=3)


def read_plan(layout: PlanLayout, pinned: torch.Tensor, batch_size: int) -> PlanArrays | None:
    """Return what FlashInfer's planner wrote to `pinned` for one token a request; None for an unknown layout."""
    known = {fields.length: fields for fields in (DECODE_PLAN, TENSOR_CORE_PLAN)}
    fields = known.get(len(layout))
    if fields is None:
        return None
    written = pinned.numpy()

    def integers(start: int, count: int) -> IntArray:
        return np.frombuffer(written, np.int32, count, offset=start)

    offsets = integers(layout[fields.offsets], batch_size + 1)
    (chunk_tokens,) = integers(layout[fields.chunk_tokens], 1)
    return PlanArrays(bool(layout[fields.splits]), int(chunk_tokens), offsets)


@dataclass(frozen=True)
class SplitRule:
    """The constants of one kernel's planner.

    Args:
        page_size: tokens a page.
        max_chunks: chunks that fit the grid; None if nobody can tell.
        max_pages: pages of a request that count, at most (a sliding window); None for all.
    """

    page_size: int
    max_chunks: int | None
    max_pages: int | None = None

    @property
    def min_chunk_pages(self) -> int:
        return max(128 // self.page_size, 1)


class DecodeSchedule:
    """The chunks of the last plan. `make` returns None for a plan that the rule does not explain."""

    def __init__(self, rule: SplitRule, chunk_pages: int, num_chunks: IntArray) -> None:
        self._rule = rule
        self._chunk_pages = chunk_pages
        self._num_chunks = num_chunks

    @classmethod
    def make(cls, rule: SplitRule, arrays: PlanArrays, counts: IntArray) -> DecodeSchedule | None:
        """Return the schedule of a plan of requests with these page counts, `[batch_size]`, each ≥ 1."""
        num_chunks = np.diff(arrays.offsets)
        if not arrays.splits:
            return cls(rule, 0, num_chunks) if (num_chunks == 1).all() else None
        made = cls(rule, arrays.chunk_tokens // rule.page_size, num_chunks)
        known = rule.max_chunks is not None and made._chunk_pages * rule.page_size == arrays.chunk_tokens
        return made if known and made._chunk_pages >= rule.min_chunk_pages and made.serves(counts) else None

    def serves(self, counts: IntArray) -> bool:
        """Return True if a plan of these page counts, as many as before, would be this one."""
        chunk, rule = self._chunk_pages, self._rule
        if chunk == 0:
            return True
        if rule.max_pages is not None:
            counts = np.minimum(counts, rule.max_pages)
        if not np.logical_and.reduce((counts + (chunk - 1)) // chunk == self._num_chunks):
            return False
        if chunk == rule.min_chunk_pages:
            return True
        smaller = chunk - 1
        assert rule.max_chunks is not None
        return int(np.add.reduce((counts + (smaller - 1)) // smaller)) > rule.max_chunks

    def bounds(self, counts: IntArray) -> PageBounds:
        """Return page counts between which this plan serves any, `counts` among them; it must serve those.

        It serves none above, but may serve some below: with no fewer pages than `counts` a smaller chunk size that did not fit still does not.
        """
        chunk, rule = self._chunk_pages, self._rule
        if chunk == 0:
            return np.ones_like(counts), np.full_like(counts, _NO_BOUND)
        least = (self._num_chunks - 1) * chunk + 1 if chunk == rule.min_chunk_pages else counts
        most = self._num_chunks * chunk
        if rule.max_pages is not None:  # no more than these count
            most = np.where(most >= rule.max_pages, np.int32(_NO_BOUND), most)
        return least, most
