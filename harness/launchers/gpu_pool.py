"""The GPUs of this machine, of which each job gets one for itself."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from harness.errors import ConfigError
from harness.nvidia import gpu_uuids

_POLL_S = 0.1


class GpuPool:
    """Lends GPUs to jobs, one at a time to each, whichever process asks: every GPU is a lock file.

    The files lie in a folder of this machine and user, so that two sweeps share the GPUs too. The kernel frees the
    lock of a process that dies.
    """

    def __init__(self, devices: Sequence[str], folder: Path | None = None) -> None:
        """`devices` are entries of `CUDA_VISIBLE_DEVICES`: indices or UUIDs."""
        self.devices = tuple(devices)
        self.folder = folder or Path(tempfile.gettempdir()) / f"cudagraph-harness-gpus-{os.getuid()}"

    @contextmanager
    def lend(self, given_up: threading.Event | None = None) -> Iterator[str | None]:
        """Hold one GPU inside the block. Waits while all are lent, at most until `given_up`.

        None from a pool without GPUs, and to a caller that has given up.
        """
        given_up = given_up or threading.Event()
        device = None
        with ExitStack() as held:
            while self.devices and (device := self._take(held)) is None:
                if given_up.wait(_POLL_S):
                    break
            yield device

    def _take(self, held: ExitStack) -> str | None:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        for device in self.devices:
            file = (self.folder / f"{device}.lock").open("ab")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                continue
            held.enter_context(file)
            return device
        return None


def pool_devices(gpus: Sequence[int | str] | None) -> tuple[str, ...]:
    """Return the GPUs to lend: those of `hydra.launcher.gpus`, by default all that this process may use.

    Where there is a driver they are UUIDs, which mean the same card in every process; where there is none, `gpus`
    is taken as it stands. Raises ConfigError for one that the driver does not know, or one named twice.
    """
    if gpus is None:
        return tuple(gpu_uuids(os.environ.get("CUDA_VISIBLE_DEVICES")))
    named = [str(gpu) for gpu in gpus]
    known = gpu_uuids(",".join(named)) if gpu_uuids(None) else named
    if len(known) < len(named):
        raise ConfigError("hydra.launcher.gpus", named, "name GPUs that `nvidia-smi -L` lists")
    if len(set(known)) < len(known):
        raise ConfigError("hydra.launcher.gpus", named, "name each GPU once")
    return tuple(known)
