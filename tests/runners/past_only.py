"""The torch backend as those for CUDA are: a step looks at its inputs, and takes its newest slots, within the graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from runners import model_runner
from runners.attention.torch_backend import TorchAttentionBackend
from runners.forward_batch import ForwardBatch
from runners.paged_kv import PagedKV


class PastOnlyBackend(TorchAttentionBackend):
    """Takes the slot of each newest token from the batch, and not from the table; plans once the inputs are there."""

    looks_up_past_only = True
    replay_plans_from = "lengths"
    #: What the first layer of the replay that comes next has to plan.
    _unplanned: tuple[int, torch.Tensor, torch.Tensor, int] | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self._unplanned = None
        super().init_forward_metadata(forward_batch)

    def init_forward_metadata_replay_cuda_graph(
        self, bs: int, rows: Any, lens: Any, lens_sum: int, mode: Any, lens_cpu: torch.Tensor
    ) -> None:
        super().init_forward_metadata_replay_cuda_graph(bs, rows, lens, lens_sum, mode, lens_cpu)
        self._unplanned = (bs, rows, lens, int(lens_cpu[:bs].max()))

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: ForwardBatch) -> torch.Tensor:
        if self._unplanned is not None:
            self._plan_static(*self._unplanned)
            self._unplanned = None
        slots, lens = self._decode_plans[layer.group_id].slots, forward_batch.seq_lens.long()
        newest = lens.clamp(max=slots.shape[1]) - 1
        slots[torch.arange(len(lens)), newest] = forward_batch.out_cache_loc
        return super().forward_decode(q, k, v, layer, forward_batch)


def is_known(kv: PagedKV) -> bool:
    """Whether the device's page table is the host's."""
    return np.array_equal(kv.page_table.numpy(), kv.page_table_cpu)


@contextmanager
def runners_attend_with(backend: type[TorchAttentionBackend]) -> Iterator[None]:
    """Runners built in the body get this backend."""

    def create(name: str, groups: Any, kv: Any, options: Any) -> TorchAttentionBackend:
        limits = {"max_batch_size": options.max_batch_size, "max_seq_len": options.max_seq_len}
        return backend(groups, kv, device=options.device, **limits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "create_attention_backend", create)
        yield
