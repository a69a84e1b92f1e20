"""Builds steps from request-table rows, lengths and token ids; all on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from runners.forward_batch import ForwardBatch, ForwardMode, HostRows
from runners.paged_kv import PagedKV


def decode_batch(
    kv: PagedKV,
    rows: npt.NDArray[np.int32],
    seq_lens: npt.NDArray[np.int32],
    token_ids: npt.NDArray[np.int64],
    token_source: npt.NDArray[np.int32] | None = None,
) -> ForwardBatch:
    """Return a decode step that appends `token_ids` at position `seq_lens - 1` of each row.

    All are `[batch_size]` and are copied. `seq_lens` counts the new token; its page must be there already.
    `token_source` is that of `ForwardBatch`.
    """
    wide = np.empty((3, len(rows)), dtype=np.int64)
    narrow = np.empty((3, len(rows)), dtype=np.int32)
    wide[0] = token_ids
    positions = np.subtract(seq_lens, 1, out=wide[1])
    wide[2] = kv.decode_slots(rows, positions)
    narrow[0], narrow[1] = rows, seq_lens
    narrow[2] = -1 if token_source is None else token_source
    return _batch_of(wide, narrow, token_source is not None)


def fed_batch(batch: ForwardBatch, token_source: npt.NDArray[np.int32]) -> ForwardBatch:
    """Return a copy of a decode step on the host, with `token_source` `[batch_size]`."""
    rows = batch.host_rows
    if rows is not None and rows.are_of(batch):
        wide, narrow = rows.wide.copy(), rows.narrow.copy()
        narrow[2] = token_source
        return _batch_of(wide, narrow, is_fed=True)
    # What `decode_batch` made was changed since, so that it is not known to be in order.
    wide = np.stack([batch.input_ids, batch.positions, batch.out_cache_loc])
    narrow = np.stack([batch.req_pool_indices, batch.seq_lens_cpu, token_source])
    return replace(_batch_of(wide, narrow, is_fed=True), host_rows=None)


def _batch_of(wide: npt.NDArray[np.int64], narrow: npt.NDArray[np.int32], is_fed: bool) -> ForwardBatch:
    """Return the decode step of `HostRows`' arrays."""
    input_ids, positions, slots = map(torch.from_numpy, wide)
    rows, lens = map(torch.from_numpy, narrow[:2])
    source = torch.from_numpy(narrow[2]) if is_fed else None
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=wide.shape[1],
        input_ids=input_ids,
        positions=positions,
        req_pool_indices=rows,
        seq_lens=lens,
        seq_lens_cpu=lens,
        seq_lens_sum=int(np.add.reduce(narrow[1])),
        out_cache_loc=slots,
        token_source=source,
        host_rows=HostRows(wide, narrow, (input_ids, positions, slots, rows, lens), source),
    )


def extend_batch(
    kv: PagedKV, rows: Sequence[int], starts: Sequence[int], token_ids: Sequence[npt.NDArray[Any]]
) -> ForwardBatch:
    """Return a prefill step that appends `token_ids[i]` to the request in `rows[i]` from `starts[i]` on."""
    counts = [len(ids) for ids in token_ids]
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    spans = list(zip(rows, starts, ends, strict=True))
    lens = torch.tensor(ends, dtype=torch.int32)
    positions = [np.arange(start, end, dtype=np.int64) for start, end in zip(starts, ends, strict=True)]
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(rows),
        input_ids=torch.from_numpy(np.concatenate(token_ids).astype(np.int64)),
        positions=torch.from_numpy(np.concatenate(positions)),
        req_pool_indices=torch.tensor(rows, dtype=torch.int32),
        seq_lens=lens,
        seq_lens_cpu=lens,
        seq_lens_sum=sum(ends),
        out_cache_loc=torch.from_numpy(np.concatenate([kv.slots(*span) for span in spans])),
        extend_seq_lens_cpu=counts,
    )
