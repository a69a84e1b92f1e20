"""Where the tensors lay that the graphs were captured with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from runners.errors import StaleGraphError

Named = Callable[[], Mapping[str, torch.Tensor]]


class CapturedAddresses:
    """Notes the addresses of static tensors, and refuses a replay after one of them has moved.

    A graph holds plain addresses. After its KV pool or a buffer was replaced it would read and write
    memory that belongs to somebody else, without any error.

    Before a launch `check` looks at who the tensors are: their addresses lie scattered over a few hundred
    cache lines, which cost a step on a cold cache up to 50 µs. `confirm` reads the addresses themselves
    once the device is at work; only a tensor that got other storage under its feet waits until then.

    Args:
        tensors: the static tensors as they are now, without their names: every step asks for these.
        named: the same tensors by name, asked for now and when something has moved.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], named: Named) -> None:
        self._identities = list(map(id, tensors))
        self._addresses = _addresses(tensors)
        self._by_name = _by_name(named)
        self._named = named

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise StaleGraphError if a tensor was replaced by one that lies elsewhere."""
        identities = list(map(id, tensors))
        if identities != self._identities:
            self.confirm(tensors)
            self._identities = identities

    def confirm(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise StaleGraphError, with the names, unless every tensor is where it was."""
        if _addresses(tensors) == self._addresses:
            return
        before, now = self._by_name, _by_name(self._named)
        moved = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        more = " and more" if len(moved) > 5 else ""
        raise StaleGraphError(
            f"the graphs read memory that was replaced since the capture: {', '.join(moved[:5])}{more}. "
            "Call capture() again, or keep the KV pool and the buffers."
        )


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))


def _by_name(named: Named) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in named().items()}
