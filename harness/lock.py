"""A lock between processes, and between machines where the shared file system has locks."""

from __future__ import annotations

import errno
import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_POLL_S = 0.05
_BUSY = (errno.EAGAIN, errno.EACCES)


@contextmanager
def locked(path: Path, wait_s: float | None = None) -> Iterator[bool]:
    """Hold the lock of the file `path`, made if need be, inside the block; yields whether it is held.

    Waits for the holder, `wait_s` seconds at most (for good without it). False where time ran out, or where the
    file system has no locks (some network mounts): the caller goes on, and must bear two at a time. The
    kernel frees the lock of a process that dies.
    """
    with path.open("ab") as file:
        yield _acquire(file, wait_s)


def _acquire(file: IO[bytes], wait_s: float | None) -> bool:
    deadline = None if wait_s is None else time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if deadline is None else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno not in _BUSY or deadline is None or time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        else:
            return True
