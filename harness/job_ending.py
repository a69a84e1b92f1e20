"""How a job ends: the status that an exception stands for, and the error that the record keeps."""

from __future__ import annotations

import traceback
from typing import Any

from harness.errors import ConfigError
from harness.interruptions import JobKilledError, JobTimeoutError
from harness.record import JobRecord, Status


class ParityFailedError(Exception):
    """Replay and eager differ by more than the tolerance."""


def status_of(error: BaseException) -> Status:
    """Return the status that an exception stands for; anything unforeseen is `failed`."""
    from runners.errors import CaptureOutOfMemoryError, UnsupportedModelError
    from runners.models.sources import ModelSourceError

    kinds: tuple[tuple[type[BaseException], Status], ...] = (
        (ConfigError, Status.INVALID_CONFIG),
        (UnsupportedModelError, Status.INVALID_CONFIG),
        (ModelSourceError, Status.INVALID_CONFIG),
        (CaptureOutOfMemoryError, Status.CAPTURE_OOM),
        (ParityFailedError, Status.PARITY_FAILED),
        (JobTimeoutError, Status.TIMEOUT),
        (JobKilledError, Status.KILLED),
        (KeyboardInterrupt, Status.INTERRUPTED),
    )
    return next((status for kind, status in kinds if isinstance(error, kind)), Status.FAILED)


def end_record(record: JobRecord, status: Status, error: BaseException | None = None) -> Status:
    """Write the final status; the error keeps its kind, message and traceback."""
    parts: dict[str, Any] = {"status": status}
    if error is not None:
        parts["error"] = {
            "kind": getattr(error, "signal_name", type(error).__name__),
            "message": str(error) or "no message",
            "traceback": "".join(traceback.format_exception(error)),
        }
    record.update(**parts)
    return status
