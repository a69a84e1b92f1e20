"""Builds steps from request-table rows, lengths and token ids; all on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from runners.forward_batch import ForwardBatch, ForwardMode
from runners.paged_kv import PagedKV


def decode_batch(
    kv: PagedKV,
    rows: npt.NDArray[np.int32],
    seq_lens: npt.NDArray[np.int32],
    token_ids: npt.NDArray[np.int64],
) -> ForwardBatch:
    """Return a decode step that appends `token_ids` at position `seq_lens - 1` of each row.

    All three are `[batch_size]`. `seq_lens` counts the new token; its page must be there already.
    """
    positions = seq_lens.astype(np.int64) - 1
    arrays: dict[str, npt.NDArray[Any]] = {
        "input_ids": token_ids,
        "positions": positions,
        "req_pool_indices": rows,
        "seq_lens_cpu": seq_lens,
        "out_cache_loc": kv.decode_slots(rows, positions),
    }
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=len(rows),
        input_ids=tensors["input_ids"],
        positions=tensors["positions"],
        req_pool_indices=tensors["req_pool_indices"],
        seq_lens=tensors["seq_lens_cpu"],
        seq_lens_cpu=tensors["seq_lens_cpu"],
        seq_lens_sum=int(seq_lens.sum()),
        out_cache_loc=tensors["out_cache_loc"],
        arrays={name: (tensors[name], array) for name, array in arrays.items()},
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
