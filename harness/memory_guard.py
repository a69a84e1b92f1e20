"""Watches what memory a job's processes hold, so that the kernel need not choose a victim among all that run here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MIB = 1024**2
#: Of the machine's or container's memory, what a job may take where nothing else is asked for.
DEFAULT_SHARE = 0.9
#: Where a container's limit stands, by version of cgroups.
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
#: What the kernel cannot drop; pages of mapped files, weights among them, it can.
_HELD = ("RssAnon:", "RssShmem:")


class MemoryGuard:
    """The limit of one job: of the process `pid` and all below it, by its own memory on the host."""

    def __init__(self, pid: int, max_memory_mib: float | None) -> None:
        self._pid = pid
        self._asked_mib = max_memory_mib
        self.limit_bytes = total_bytes() * DEFAULT_SHARE if max_memory_mib is None else max_memory_mib * MIB

    def excess(self) -> str | None:
        """Return what to say of a job that is over its limit; None while it is not."""
        held = held_bytes(self._pid)
        if held <= self.limit_bytes:
            return None
        whose = (
            f"{DEFAULT_SHARE:.0%} of this machine's, the limit of job.max_memory_mib=null"
            if self._asked_mib is None
            else f"job.max_memory_mib={self._asked_mib:g}"
        )
        return f"its processes held {held / MIB:,.0f} MiB of host memory, over {whose}"


def held_bytes(pid: int) -> int:
    """Return the host memory of a process and all that it started, shared pages of a fork counted in each."""
    return sum(map(_own_bytes, process_tree(pid)))


def process_tree(pid: int) -> Iterator[int]:
    """Yield `pid` and all processes below it."""
    yield pid
    with suppress(OSError):  # it has just ended
        for listing in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in listing.read_text().split():
                yield from process_tree(int(child))


def _own_bytes(pid: int) -> int:
    with suppress(OSError), open(f"/proc/{pid}/status") as lines:
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(_HELD))
    return 0


def total_bytes() -> int:
    """Return the memory of this machine, or what its container may use of it."""
    with open("/proc/meminfo") as lines:
        found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")]
    for path in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # not that version, or "max"
            found.append(int(Path(path).read_text()))
    return min(found)
