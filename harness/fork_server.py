"""Starts the jobs of a sweep by forking a process that has imported torch, and nothing else of it.

Importing torch and transformers takes seconds of every job; here it takes them once. The server imports, never
touches CUDA, runs no operation of torch (so that no thread of OpenMP is lost in a fork), and waits on its standard
input, a socket: each message on it brings the other socket of one job. On that one it answers the job's process
id, and how the job ended. It ends, and every job with it, once the process that started it is gone.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import random
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from harness.parent_death import end_with_parent

#: Imported before the first fork. Not those that start a thread when they are imported (pyarrow, pandas), nor wandb,
#: whose temporary folder would be that of all jobs.
_MODULES = (
    "torch", "transformers", "transformers.models.auto.modeling_auto",
    *(f"transformers.models.{family}.modeling_{family}" for family in (
        "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3",
    )),
    "rich.progress", "harness.experiment", "harness.build", "harness.parity", "harness.size_sweep",
    "harness.workload_replay", "harness.workload.source", "harness.summary", "harness.tracking_content",
)  # fmt: skip
_MESSAGE_BYTES = 1 << 20
#: Signals that end a terminal's or a cluster's processes: the server outlives them, its jobs hear them.
_DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class _Job:
    pid: int
    link: socket.socket
    #: Its end was told. Its number is taken by nobody else until the other side has heard.
    is_told: bool = False


class ForkServer:
    """The server's own process: one thread, one loop."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._jobs: dict[int, _Job] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._pid = os.getpid()

    def serve(self) -> None:
        """Fork jobs until the control socket is closed; then end those that still run."""
        for number in _DEAF_TO:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._woken.fileno())
        self._control.send(b"ready\n")
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    if not self._take_order():
                        self._end_all()
                        return
                elif key.fileobj is self._wake:
                    self._wake.recv(4096)
                else:
                    self._let_go(key.data)
            self._tell_ends()

    def _take_order(self) -> bool:
        try:
            message, links, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, 1)
        except ConnectionError:
            return False
        if not message:
            return False
        link = socket.socket(fileno=links[0])
        link.set_inheritable(False)
        self._start(json.loads(message), link)
        return True

    def _start(self, order: Mapping[str, Any], link: socket.socket) -> None:
        pid = os.fork()
        if pid == 0:
            link.close()
            self._become(order)
        with suppress(ProcessLookupError, PermissionError):  # the child has done it, or more
            os.setpgid(pid, pid)
        job = _Job(pid, link)
        self._jobs[pid] = job
        self._selector.register(link, selectors.EVENT_READ, job)
        self._say(job, f"{pid}\n")

    def _become(self, order: Mapping[str, Any]) -> NoReturn:
        """Turn the fork into the job's process, and end with its exit code."""
        code = 1
        try:
            self._detach()
            run_forked(order)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(BaseException):
                atexit._run_exitfuncs()  # the job's own, as at the end of any process: W&B's service is one of them
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _detach(self) -> None:
        end_with_parent(self._pid)
        os.setpgid(0, 0)
        atexit._clear()  # what the server would tidy up is not this process's to remove
        signal.set_wakeup_fd(-1)
        for number in (*_DEAF_TO, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._selector.close()
        for end in (self._control, self._wake, self._woken, *(job.link for job in self._jobs.values())):
            end.close()

    def _tell_ends(self) -> None:
        for job in self._jobs.values():
            if not job.is_told:
                # NOTE: not reaped yet, so that a late signal cannot hit another process of this number.
                ended = os.waitid(os.P_PID, job.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is not None:
                    job.is_told = True
                    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                    self._say(job, f"{code}\n")

    def _say(self, job: _Job, text: str) -> None:
        with suppress(OSError):  # the other side is gone, and `_let_go` comes next
            job.link.sendall(text.encode())

    def _let_go(self, job: _Job) -> None:
        """The other side closed its end: it has heard how the job ended, or wants no more of it."""
        if not job.is_told:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
        os.waitpid(job.pid, 0)
        self._selector.unregister(job.link)
        job.link.close()
        del self._jobs[job.pid]

    def _end_all(self) -> None:
        for job in list(self._jobs.values()):
            self._let_go(job)


def run_forked(order: Mapping[str, Any]) -> NoReturn:
    """Run the job of an order in this process, a fork, and end it."""
    import torch

    from harness.forked_job import NO_CUDA_CODE
    from harness.isolation import LOG_FILE, main

    job_dir = Path(order["job_dir"])
    log = os.open(job_dir / LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nowhere, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["cwd"])
    random.seed()
    if getattr(torch._C, "_cuda_isInBadFork", bool)():
        sys.exit(NO_CUDA_CODE)
    sys.argv = ["isolation.py", str(job_dir)]
    sys.exit(main())


def import_all() -> None:
    """Import what every job does; what is missing here is for the job itself to say."""
    # NOTE: torch would otherwise ask CUDA itself whether it is there, which no fork may use again.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    for module in _MODULES:
        with suppress(Exception):
            importlib.import_module(module)


def serve_stdin() -> None:
    """Serve the socket that is this process's standard input."""
    control = socket.socket(fileno=os.dup(0))
    import_all()
    ForkServer(control).serve()
    os._exit(0)  # taking torch down would take a second
