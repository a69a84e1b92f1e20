"""Brings sampled token ids to the host: pinned memory and an event, never a blocking read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from runners.forward_batch import LogitsProcessorOutput
from runners.handover import NUM_ANSWERS


@dataclass
class PendingTokens:
    """Token ids on their way to the host; the memory is reused after `num_buffers` further steps."""

    _host: np.ndarray
    _arrived: torch.cuda.Event | None

    def read(self) -> np.ndarray:
        """Wait for them and return the ids, `[batch_size]` int64, as a copy of one's own."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.copy()


class TokenReader:
    """Samples greedily where the step did not, and copies the ids to rotating pinned buffers if the graph did not."""

    def __init__(self, device: torch.device, max_batch_size: int, num_buffers: int = 2) -> None:
        assert num_buffers <= NUM_ANSWERS
        self._on_cuda = device.type == "cuda"
        self._buffers = [
            torch.empty(max_batch_size, dtype=torch.int64, pin_memory=self._on_cuda)
            for _ in range(num_buffers)
        ]
        self._events = [torch.cuda.Event() if self._on_cuda else None for _ in range(num_buffers)]
        self._next = 0

    def enqueue(self, output: LogitsProcessorOutput) -> PendingTokens:
        """Have the step's token ids arrive behind the step, and return at once."""
        event = self._events[self._next]
        host = output.posted_token_ids
        if host is None:
            host = self._queue_copy(output)
        self._next = (self._next + 1) % len(self._buffers)
        if event is not None:
            event.record()
        return PendingTokens(host, event)

    def _queue_copy(self, output: LogitsProcessorOutput) -> np.ndarray:
        ids = output.next_token_ids
        if ids is None:
            logits = output.next_token_logits
            # On a CPU the argmax of bfloat16 takes 3.5 times as long as a float32 copy and the argmax of that.
            ids = (logits if self._on_cuda else logits.float()).argmax(dim=-1)
        host = self._buffers[self._next][: ids.shape[0]]
        host.copy_(ids, non_blocking=True)
        return host.numpy()
