"""Where the tensors lay that the graphs were captured with."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from runners.errors import StaleGraphError


class CapturedAddresses:
    """Notes the addresses of static tensors, and refuses a replay after one of them has moved.

    A graph holds plain addresses. After its KV pool or a buffer was replaced it would read and write
    memory that belongs to somebody else, without any error.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._captured = _addresses(tensors)

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise StaleGraphError, with the names, unless every tensor is where it was."""
        now, captured = _addresses(tensors), self._captured
        if now == captured:
            return
        moved = sorted(name for name in now.keys() | captured.keys() if now.get(name) != captured.get(name))
        more = " and more" if len(moved) > 5 else ""
        raise StaleGraphError(
            f"the graphs read memory that was replaced since the capture: {', '.join(moved[:5])}{more}. "
            "Call capture() again, or keep the KV pool and the buffers."
        )


def _addresses(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}
