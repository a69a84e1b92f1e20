"""The capture lists that a plan is compared with: every engine's own."""

from __future__ import annotations

from typing import NamedTuple

from runners.capture_sizes import POLICIES, capture_sizes


class NamedList(NamedTuple):
    """A capture list and whose it is."""

    name: str
    sizes: tuple[int, ...]
    #: The engine's release that it follows; empty for a list that is not an engine's.
    engine_version: str = ""


def engine_lists(max_batch_size: int) -> list[NamedList]:
    """Return each engine's list for batches up to `max_batch_size`, the maximum appended where it lacks.

    An engine whose own schedule stops below the maximum is in twice: covered, and with its own gap,
    whose batches run eagerly.
    """
    lists = []
    for name, policy in POLICIES.items():
        if not policy.engine_version:
            continue
        covered = capture_sizes(name, max_batch_size)
        lists.append(NamedList(name, covered.sizes, policy.engine_version))
        own = capture_sizes(name, max_batch_size, allow_gap=True)
        if own.sizes != covered.sizes:
            lists.append(NamedList(f"{name}, own gap", own.sizes, policy.engine_version))
    return lists
