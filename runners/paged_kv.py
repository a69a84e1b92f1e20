"""The paged KV cache: the storage that pages stand for, kept in step with who holds which.

All bookkeeping is on the host, in numpy; the device sees one table, refreshed by `flush`.

Page 0 is never handed out. It is the *null page*: padding rows read and write it, so a padding row
is an ordinary request of length 1 on reserved storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from runners.attention.base import AttentionGroup
from runners.errors import NullPageError, OutOfPagesError, RunnerError
from runners.page_pool import NULL_PAGE, PagePool
from runners.request_table import PADDING_ROW, RequestTable

__all__ = ["NULL_PAGE", "PADDING_ROW", "PagePool", "PagedKV", "RequestTable"]

IntArray = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]


class PagedKV:
    """Keys and values of all layers in pages of `page_size` tokens.

    A *slot* is `page * page_size + offset`: the index of one token in the flattened cache. Slots of
    the null page are `0 .. page_size - 1`; no slot is ever negative.

    Args:
        layer_groups: the attention group of each layer, in order; gives heads and head size.
        num_pages: pages a layer, the null page included.
        page_size: tokens a page.
        max_requests: requests that may hold pages at the same time.
        max_seq_len: the longest request, in tokens; gives the width of the page table.
        dtype: of the cache: float32, bfloat16, float16, float8_e4m3fn or float8_e5m2.
        device: where the cache lives.
    """

    def __init__(
        self,
        layer_groups: Sequence[AttentionGroup],
        *,
        num_pages: int,
        page_size: int,
        max_requests: int,
        max_seq_len: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.layer_groups = list(layer_groups)
        self.page_size = page_size
        #: Divides by the page size; None where no shift does. An array: numpy would make one of a number.
        self._shift = np.array(page_size.bit_length() - 1) if page_size.bit_count() == 1 else None
        self._mask = np.array(page_size - 1)
        self.max_seq_len = max_seq_len
        self.dtype = dtype
        self.device = torch.device(device)
        #: Changes whenever the cache tensors are replaced, so that captured graphs can be refused.
        self.generation = 0
        #: Per layer: `[num_pages, page_size, num_kv_heads, head_dim]`. Tuples, replaced as a whole: a
        #: replay sees a new cache by looking at two objects.
        self.k_cache: tuple[torch.Tensor, ...] = ()
        self.v_cache: tuple[torch.Tensor, ...] = ()
        self.table = RequestTable(max_requests, self.pages_needed(max_seq_len), self.device)
        self.pool = PagePool(num_pages, page_size)
        self._make_caches()

    def _make_caches(self) -> None:
        def zeros(group: AttentionGroup) -> torch.Tensor:
            shape = (self.num_pages, self.page_size, group.num_kv_heads, group.head_dim)
            return torch.zeros(shape, dtype=self.dtype, device=self.device)

        self.k_cache = tuple(map(zeros, self.layer_groups))
        self.v_cache = tuple(map(zeros, self.layer_groups))
        # Pages that hold NaN on purpose. They are zeroed again before a request gets them.
        self._is_poisoned = np.zeros(self.num_pages, dtype=np.bool_)

    def resize(self, num_pages: int) -> None:
        """Replace the cache by one of `num_pages` pages. Only while no request holds a page.

        The tensors change, so `generation` changes too: bind the layers and capture again.
        """
        if self.pool.num_held:
            raise RunnerError(f"the KV pool cannot be resized while {self.pool.num_held} pages are held.")
        self.pool = PagePool(num_pages, self.page_size)
        self.k_cache = self.v_cache = ()  # free the old storage before asking for the new
        self._make_caches()
        self.generation += 1

    # --- numbers -------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    @property
    def num_free_pages(self) -> int:
        return self.pool.num_free

    @property
    def num_bytes(self) -> int:
        """Bytes of all cache tensors."""
        return sum(cache.nbytes for cache in (*self.k_cache, *self.v_cache))

    @property
    def page_table(self) -> torch.Tensor:
        """`[max_requests + 1, max_pages]` int32 on the device."""
        return self.table.page_table

    @property
    def page_table_cpu(self) -> npt.NDArray[np.int32]:
        return self.table.page_table_cpu

    def pages_needed(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens of one request."""
        return -(-num_tokens // self.page_size)

    # --- a request's life ----------------------------------------------------------------------

    def add_request(self) -> int:
        """Take a row of the request table. Raises RunnerError if all are in use."""
        return self.table.add()

    def extend(self, row: int, new_len: int) -> bool:
        """Let the request in `row` grow to `new_len` tokens.

        False, and nothing changed, if too few pages are free: the caller decides whom to preempt.
        """
        self.table.check_live(row)
        if new_len > self.max_seq_len:
            raise RunnerError(
                f"row {row} asks for {new_len} tokens, more than max_seq_len={self.max_seq_len}."
            )
        missing = self.pages_needed(new_len) - int(self.table.num_pages[row])
        if missing > 0:
            pages = self.pool.allocate(missing)
            if pages is None:
                return False
            self._clean(pages)
            self.table.append(row, pages)
        self.table.lengths[row] = max(new_len, self.table.lengths[row])
        return True

    def open_pages(self, rows: Int32Array, seq_lens: Int32Array) -> bool:
        """Give a page to each request whose token at `seq_len - 1` is the first of one.

        Both are `[batch_size]`, of the decode step that comes next; the requests hold pages for all their
        earlier tokens. False, and nothing changed, if too few pages are free.
        """
        positions = seq_lens - 1
        offsets = positions % self.page_size
        if np.minimum.reduce(offsets, initial=1):
            return True
        opening = np.flatnonzero(offsets == 0)
        rows, columns = rows[opening], positions[opening] // self.page_size
        held = self.table.num_pages.take(rows)
        if (held != columns).any():
            if (held < columns).any():
                row = int(rows[held < columns][0])
                self.table.check_live(row)
                raise RunnerError(f"row {row} lacks pages for earlier tokens: call extend.")
            rows, columns = rows[held == columns], columns[held == columns]
        if np.maximum.reduce(columns, initial=0) >= self.page_table_cpu.shape[1]:
            raise RunnerError(
                f"row {rows[columns.argmax()]} asks for more than max_seq_len={self.max_seq_len}."
            )
        pages = self.pool.allocate(len(rows))
        if pages is None:
            return False
        self._clean(pages)
        self.table.open(rows, columns, pages)
        return True

    def release(self, row: int) -> None:
        """Give back the row and all its pages; the row's columns point at the null page again."""
        self.pool.release(self.table.remove(row))

    # --- slots ---------------------------------------------------------------------------------

    def slots(self, row: int, start: int, end: int) -> IntArray:
        """Slots of the tokens `[start, end)` of one request, `[end - start]` int64."""
        positions = np.arange(start, end, dtype=np.int64)
        return self.decode_slots(np.full(len(positions), row, dtype=np.int64), positions)

    def decode_slots(self, rows: npt.ArrayLike, positions: npt.ArrayLike) -> IntArray:
        """Slot of position `positions[i]` of the request in `rows[i]`, `[n]` int64.

        Positions of the same row must ascend. Raises OutOfPagesError for a token that has no page or is
        beyond `max_seq_len`, so that no write goes astray.
        """
        rows, positions = np.asarray(rows), np.asarray(positions, dtype=np.int64)
        # The table may be wider, by a part of a page. As an unsigned number a negative one is beyond any length.
        if np.maximum.reduce(positions.view(np.uint64), initial=0) >= self.max_seq_len:
            raise OutOfPagesError(
                f"positions outside 0..{self.max_seq_len - 1} have no slot: raise model.max_seq_len."
            )
        slots = self._find_slots(rows, positions)
        # A token with a slot is about to be written: it is no tail, whoever allocated its page.
        self.table.cover(rows, positions + 1)
        return slots

    def _find_slots(self, rows: npt.NDArray[Any], positions: IntArray) -> IntArray:
        if not positions.size:
            return np.empty(0, dtype=np.int64)
        columns, offsets = self._divide(positions)
        pages = self.table.pages(rows, columns)
        if np.minimum.reduce(pages) == NULL_PAGE:
            has_none = (pages == NULL_PAGE) & (rows != PADDING_ROW)
            if has_none.any():
                raise OutOfPagesError(f"row {rows[has_none][0]} has no page for a token: call extend first.")
        slots: IntArray = np.multiply(pages, self.page_size, dtype=np.int64)
        slots += offsets
        return slots

    def _divide(self, positions: IntArray) -> tuple[IntArray, IntArray]:
        """Page column and place in the page of each position."""
        if self._shift is None:
            return np.divmod(positions, self.page_size)
        return positions >> self._shift, positions & self._mask

    def flush(self) -> None:
        """Bring the device's page table up to date. Call it before planning a step."""
        self.table.flush()

    def flush_urgent(self) -> None:
        """`flush`, but leave the pages of `open_pages` to `settle`: for a step that does not look them up."""
        self.table.flush_urgent()

    def settle(self) -> None:
        """Flush what is left, after a launch, and note which host buffers are read. A later `flush` does it too."""
        self.table.settle()

    # --- poison and checks ---------------------------------------------------------------------

    def zero_null_page(self) -> None:
        for cache in (*self.k_cache, *self.v_cache):
            cache[NULL_PAGE].zero_()

    def check_null_page(self) -> None:
        """Raise NullPageError if the null page holds NaN or an infinity. Reads the device."""
        for layer, caches in enumerate(zip(self.k_cache, self.v_cache, strict=True)):
            for name, cache in zip("KV", caches, strict=True):
                if not bool(cache[NULL_PAGE].float().isfinite().all()):
                    raise NullPageError(
                        f"the {name} cache of layer {layer} holds a non-finite value in the null page: "
                        "a padding row wrote it, and every padding row of a later step would read it."
                    )

    def poison_unallocated(self) -> None:
        """Fill every page that nobody holds with NaN, the null page excepted."""
        free = self.pool.free_pages()
        self._poison_pages(free[~self._is_poisoned[free]])

    def poison_tails(self) -> None:
        """Fill the slots past each live request's length, to the end of its last page, with NaN.

        Only for backends that declare `masks_tail`.
        """
        slots = [self._tail_slots(int(row)) for row in self.table.live_rows()]
        tail = torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *slots]))
        if len(tail) == 0:
            return
        tail = tail.to(self.device)
        for cache in (*self.k_cache, *self.v_cache):
            _fill(cache.flatten(0, 1), tail, float("nan"))

    def _tail_slots(self, row: int) -> IntArray:
        end = int(self.table.num_pages[row]) * self.page_size
        positions = np.arange(self.table.lengths[row], end, dtype=np.int64)
        slots = self._find_slots(np.full(len(positions), row), positions)
        # These pages carry NaN when they are released, whoever gets them next.
        self._is_poisoned[slots // self.page_size] = True
        return slots

    def _poison_pages(self, pages: IntArray) -> None:
        self._fill_pages(pages, float("nan"))
        self._is_poisoned[pages] = True

    def _clean(self, pages: Sequence[int]) -> None:
        given = np.array(pages, dtype=np.int64)
        is_dirty = self._is_poisoned.take(given)
        if is_dirty.any():
            dirty = given[is_dirty]
            self._fill_pages(dirty, 0.0)
            self._is_poisoned[dirty] = False

    def _fill_pages(self, pages: IntArray, value: float) -> None:
        if len(pages) == 0:
            return
        index = torch.from_numpy(pages).to(self.device)
        for cache in (*self.k_cache, *self.v_cache):
            _fill(cache, index, value)

    def captured_tensors(self) -> dict[str, torch.Tensor]:
        """Tensors whose addresses a captured graph holds, by name."""
        tensors = {"page_table": self.page_table}
        tensors |= {f"k_cache.{i}": cache for i, cache in enumerate(self.k_cache)}
        return tensors | {f"v_cache.{i}": cache for i, cache in enumerate(self.v_cache)}


def _fill(target: torch.Tensor, index: torch.Tensor, value: float) -> None:
    """Fill the lines `index` of `target`. By bit pattern: torch has no fill for a float8 tensor."""
    if target.dtype.itemsize > 1:
        target.index_fill_(0, index, value)
        return
    pattern = int(torch.tensor(value).to(target.dtype).view(torch.uint8))
    target.view(torch.uint8).index_fill_(0, index, pattern)
