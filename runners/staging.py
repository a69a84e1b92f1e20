"""Host buffers from which a queued copy may still read."""

from __future__ import annotations

import torch


class CopyFences:
    """Turns over a few host buffers: one is handed out again only once the copies from it have run.

    Without that the device would receive the next step's numbers. The event of a turn is recorded by
    `settle`, at the latest when the next turn begins: so a step may queue its copies, launch its graph,
    and only then spend the time. An event recorded late waits for more than it must, never for less.

    Args:
        depth: turns, and so the copies that may be queued before `next_turn` has to wait.
        device: where the copies go; nothing to wait for unless it is CUDA.
    """

    def __init__(self, depth: int, device: torch.device) -> None:
        self._events = [torch.cuda.Event() for _ in range(depth)] if device.type == "cuda" else []
        self._depth = depth
        self._turn = 0
        self._is_settled = True

    def next_turn(self) -> int:
        """Return the number of the buffer to write next, once no queued copy reads it."""
        self.settle()
        self._turn = turn = (self._turn + 1) % self._depth
        self._is_settled = False
        if self._events:
            self._events[turn].synchronize()
        return turn

    def settle(self) -> None:
        """Mark what this turn's buffer feeds: everything queued on the current stream until now."""
        if self._is_settled:
            return
        self._is_settled = True
        if self._events:
            self._events[self._turn].record()
