"""How often dynamo may compile one function: raised while runners hold it, and then put back."""

from __future__ import annotations

from typing import Any

import torch._dynamo

_config: Any = torch._dynamo.config
_held: list[RecompileLimit] = []
_before: tuple[int, int] = (0, 0)


class RecompileLimit:
    """Lets dynamo compile one function `num_graphs` times, until `release`.

    Its own limit of 8 is meant for functions that recompile by accident; ours compile once a size and
    attention group on purpose. The limits are the process's, so that of the largest holder counts, and
    what was there before comes back with the last release, in whatever order runners end.
    """

    def __init__(self, num_graphs: int) -> None:
        global _before
        self.num_graphs = num_graphs
        if not _held:
            _before = (_config.recompile_limit, _config.accumulated_recompile_limit)
        _held.append(self)
        _apply()

    def release(self) -> None:
        """Give the limit back; a second call does nothing."""
        if self in _held:
            _held.remove(self)
            _apply()


def _apply() -> None:
    needed = max((limit.num_graphs for limit in _held), default=0)
    _config.recompile_limit = max(_before[0], needed)
    _config.accumulated_recompile_limit = max(_before[1], needed)
