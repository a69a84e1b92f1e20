"""The errors that a runner raises. Each message names the value and the remedy."""

from __future__ import annotations


class RunnerError(RuntimeError):
    """Base of everything that a runner raises on purpose."""


class StaleGraphError(RunnerError):
    """A captured graph reads memory that has been replaced since the capture."""


class CaptureError(RunnerError):
    """A capture failed. Nothing of it is left behind."""


class CaptureOutOfMemoryError(CaptureError):
    """A capture ran out of device memory.

    `capture_size` is the size being captured, `missing_bytes` what the allocator lacked (None if it
    did not say).
    """

    def __init__(self, message: str, *, capture_size: int, missing_bytes: int | None) -> None:
        super().__init__(message)
        self.capture_size = capture_size
        self.missing_bytes = missing_bytes


class PlanLayoutError(RunnerError):
    """An attention plan differs in layout from the one that the graph captured."""


class NoUsableGraphError(RunnerError):
    """`above_max=error` or `on_miss=error` and no graph fits the batch."""


class NullPageError(RunnerError):
    """The reserved null page holds something that is not finite."""


class OutOfPagesError(RunnerError):
    """The KV pool has fewer free pages than a request needs."""


class UnsupportedModelError(RunnerError):
    """The checkpoint belongs to a family that the harness does not run; the message says why."""
