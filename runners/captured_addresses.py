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

    Args:
        tensors: the static tensors as they are now, without their names: every step asks for these.
        named: the same tensors by name, asked for now and when something has moved.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], named: Named) -> None:
        self._addresses = _addresses(tensors)
        self._by_name = _by_name(named)
        self._named = named

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
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
