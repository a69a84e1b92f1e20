"""The other side of the fork server: starts it when it is needed, and a job's process through it. Imports no torch."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

#: A server that has not imported everything by then is given up, and jobs start without it.
_START_S = 120.0
#: Set for each job anew, after the imports; any other variable is read by an import, and needs another server.
_PER_JOB = ("CUDA_VISIBLE_DEVICES",)
#: What a fork ends with at once if it cannot use CUDA.
NO_CUDA_CODE = 86


class ServerLostError(Exception):
    """There is no fork server to be had: the job's process is to be started in another way."""


class ForkedJob:
    """A job's process, forked by the server; of subprocess.Popen it has `pid` and `wait`."""

    def __init__(self, link: socket.socket, server: ServerHandle) -> None:
        self._link = link
        self._server = server  # which ends once nobody holds it
        self._heard = b""
        self._code: int | None = None
        self.pid = self._hear(None)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, negative for a signal; raises subprocess.TimeoutExpired."""
        if self._code is None:
            try:
                self._code = self._hear(timeout)
            except ServerLostError:
                self._code = -signal.SIGKILL  # the kernel kills the job with its server
            self._link.close()
        return self._code

    def _hear(self, timeout: float | None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._heard:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._link], [], [], left)[0]:
                raise subprocess.TimeoutExpired("job", timeout or 0.0)
            data = self._link.recv(64)
            if not data:
                raise ServerLostError("the fork server is gone")
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return int(line)


class ServerHandle:
    """A running fork server."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = _lasting(environment)
        self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from harness.fork_server import serve_stdin; serve_stdin()"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for us to pass on
                env=dict(environment),
            )
        self._await_ready()

    def _await_ready(self) -> None:
        self._control.settimeout(_START_S)
        try:
            is_ready = self._control.recv(16) == b"ready\n"
        except OSError:
            is_ready = False
        if not is_ready:
            self.close()
            raise ServerLostError("the fork server did not start")
        self._control.settimeout(None)

    def is_alive(self) -> bool:
        """Return whether the server still runs."""
        return self._process.poll() is None

    def start(self, job_dir: Path, environment: Mapping[str, str]) -> ForkedJob:
        """Fork the process of the job in `job_dir`; raises ServerLostError."""
        ours, theirs = socket.socketpair()
        order = {"job_dir": str(job_dir.absolute()), "environment": dict(environment), "cwd": os.getcwd()}
        try:
            with theirs:
                socket.send_fds(self._control, [json.dumps(order).encode()], [theirs.fileno()])
            return ForkedJob(ours, self)
        except OSError as error:
            raise ServerLostError(str(error)) from error

    def close(self) -> None:
        """End the server, and what it started."""
        self._control.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
            return
        self._process.kill()
        self._process.wait()


def _lasting(environment: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if key not in _PER_JOB}


_lock = threading.Lock()
_server: ServerHandle | None = None


def start_forked(job_dir: Path, environment: Mapping[str, str]) -> ForkedJob:
    """Start a job's process by the server of this process, which is started, or started again, when needed.

    Raises ServerLostError. Any thread may call it.
    """
    global _server
    with _lock:
        if _server is not None and not (_server.is_alive() and _server.environment == _lasting(environment)):
            _server = None  # jobs of other threads may still run below it
        if _server is not None:
            with suppress(ServerLostError):  # it is about to end, and does not look it yet
                return _server.start(job_dir, environment)
        _server = ServerHandle(environment)
        return _server.start(job_dir, environment)
