"""Builds the runner's batches from request-table rows, positions and token ids; all on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from runners.forward_batch import ForwardBatch, ForwardMode

if TYPE_CHECKING:
    from runners.paged_kv import PagedKV


def decode_batch(kv: PagedKV, rows: np.ndarray, seq_lens: np.ndarray, token_ids: np.ndarray) -> ForwardBatch:
    """Return a decode step that appends `token_ids` at position `seq_lens - 1` of each row.

    `rows` and `seq_lens` are `[batch_size]` int32, `token_ids` is `[batch_size]` int64. The pages
    must be there already.
    """
    positions = seq_lens.astype(np.int64) - 1
    lengths = torch.from_numpy(seq_lens)
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=len(rows),
        input_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        req_pool_indices=torch.from_numpy(rows),
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        seq_lens_sum=int(seq_lens.sum()),
        out_cache_loc=torch.from_numpy(kv.decode_slots(rows, positions)),
    )


def extend_batch(
    kv: PagedKV, rows: Sequence[int], starts: Sequence[int], token_ids: Sequence[np.ndarray]
) -> ForwardBatch:
    """Return a prefill step that appends `token_ids[i]` (int64) to row `rows[i]` from `starts[i]` on."""
    counts = [len(ids) for ids in token_ids]
    ends = np.array([start + count for start, count in zip(starts, counts, strict=True)], dtype=np.int32)
    spans = list(zip(rows, starts, ends.tolist(), strict=True))
    lengths = torch.from_numpy(ends)
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(rows),
        input_ids=torch.from_numpy(np.concatenate(token_ids)),
        positions=torch.from_numpy(
            np.concatenate([np.arange(start, end, dtype=np.int64) for _, start, end in spans])
        ),
        req_pool_indices=torch.tensor(rows, dtype=torch.int32),
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        seq_lens_sum=int(ends.sum()),
        out_cache_loc=torch.from_numpy(
            np.concatenate([kv.slots(row, start, end) for row, start, end in spans])
        ),
        extend_seq_lens_cpu=counts,
    )
