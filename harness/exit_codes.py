"""What the program's exit code says; `__main__` alone exits with it."""

from __future__ import annotations

from collections.abc import Iterable

from harness.record import Status

OK = 0
FAILED = 1
INVALID = 2
INTERRUPTED = 130


def exit_code(status: Status) -> int:
    """Return the exit code of a single job that ended with `status`."""
    if status in (Status.OK, Status.SKIPPED):
        return OK
    if status is Status.INVALID_CONFIG:
        return INVALID
    return INTERRUPTED if status is Status.INTERRUPTED else FAILED


def sweep_exit_code(statuses: Iterable[Status]) -> int:
    """Return the exit code of a sweep: any row that is neither ok nor skipped gives 1."""
    return OK if all(exit_code(status) == OK for status in statuses) else FAILED
