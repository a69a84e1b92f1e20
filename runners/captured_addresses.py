"""Where the tensors lay that the graphs were captured with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from runners.errors import StaleGraphError

#: A tensor, or a tuple of them that is only ever replaced as a whole; None where there was one.
StaticPart = torch.Tensor | tuple[torch.Tensor, ...] | None
StaticParts = tuple[StaticPart, ...]
Named = Callable[[], Mapping[str, torch.Tensor]]


class CapturedAddresses:
    """Notes the addresses of static tensors, and refuses a replay after one of them has moved.

    A graph holds plain addresses. After its KV pool or a buffer was replaced it would read and write
    memory that belongs to somebody else, without any error.

    Args:
        parts: the static tensors as they are now, without their names: each check brings them in this order.
        named: the same tensors by name.
    """

    def __init__(self, parts: StaticParts, named: Mapping[str, torch.Tensor]) -> None:
        self._addresses = _addresses(parts)
        self._by_name = _by_name(named)

    def check(self, parts: StaticParts, named: Named) -> None:
        """Raise StaleGraphError, with the names, unless every tensor lies where it did.

        `named` gives the tensors by name as they are now; asked for only if something has moved.
        """
        if _addresses(parts) == self._addresses:
            return
        before, now = self._by_name, _by_name(named())
        moved = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        more = " and more" if len(moved) > 5 else ""
        raise StaleGraphError(
            f"the graphs read memory that was replaced since the capture: {', '.join(moved[:5])}{more}. "
            "Call capture() again, or keep the KV pool and the buffers."
        )


def _addresses(parts: StaticParts) -> list[int]:
    addresses: list[int] = []
    for part in parts:
        if part is not None:
            addresses += map(torch.Tensor.data_ptr, part if isinstance(part, tuple) else (part,))
    return addresses


def _by_name(named: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in named.items()}
