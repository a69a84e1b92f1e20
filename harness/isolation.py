"""One child process a job: whatever ends it, the sweep goes on and the job has a status.

The parent imports no torch. The child reads the resolved `config.yaml` of its folder, and everything that it
prints goes to `job.log`. It is forked by a server that has imported torch (`fork_server`), or where there is none
to be had it is `python -m harness.isolation JOB_DIR PARENT`, which ends with the process of that number.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from harness.exit_codes import exit_code
from harness.forked_job import NO_CUDA_CODE, ForkedJob, ServerLostError, start_forked
from harness.memory_guard import MemoryGuard
from harness.parent_death import end_with_parent
from harness.record import JobRecord, Status
from harness.record_reader import read_result

CONFIG_FILE = "config.yaml"
LOG_FILE = "job.log"
#: The child ends itself at `job.timeout_s`; one that hangs in a driver call is killed this much later.
_GRACE_S = 30.0
#: `tracking.publish` gives up before that by itself.
_PUBLISH_S = 330.0
#: How long an interrupted child may take to write its record.
_INTERRUPT_S = 20.0


#: How often a job's time and memory are looked at.
_LOOK_S = 0.25


class Child(Protocol):
    """A job's process; it leads a process group of its own."""

    pid: int

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code, negative for a signal; raises subprocess.TimeoutExpired."""


#: The children that run now, and whether they were told to end.
_running: dict[Child, bool] = {}


def run_isolated(
    job_dir: Path,
    timeout_s: float | None = None,
    environment: Mapping[str, str] | None = None,
    max_memory_mib: float | None = None,
) -> Status:
    """Run the job whose `config.yaml` lies in `job_dir` in a process of its own, and return its status.

    `environment` is added to its variables. KeyboardInterrupt passes through once the child has ended and its
    record says so.
    """
    variables = child_environment() | dict(environment or {})
    try:
        return supervise(start_forked(job_dir, variables), job_dir, timeout_s, max_memory_mib)
    except ServerLostError as error:  # what keeps it from starting, the job itself will meet and say
        with (job_dir / LOG_FILE).open("a", encoding="utf-8") as log:
            log.write(f"started without the fork server: {error}\n")
        command = [sys.executable, "-m", "harness.isolation", str(job_dir), str(os.getpid())]
        return run_child(command, job_dir, timeout_s, variables, max_memory_mib)


def run_child(
    command: Sequence[str],
    job_dir: Path,
    timeout_s: float | None = None,
    environment: Mapping[str, str] | None = None,
    max_memory_mib: float | None = None,
) -> Status:
    """Run `command`, which records in `job_dir`, and return the job's status however the command ends."""
    with (job_dir / LOG_FILE).open("ab") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # A group of its own: Ctrl-C reaches the child once, through us, and a kill takes all of it.
            start_new_session=True,
            env=child_environment() if environment is None else dict(environment),
        )
    return supervise(child, job_dir, timeout_s, max_memory_mib)


def supervise(child: Child, job_dir: Path, timeout_s: float | None, max_memory_mib: float | None) -> Status:
    """Wait for a job's process, end it where it takes too long or too much, and return the job's status.

    Raises ServerLostError for a fork that never began, as it could not have used CUDA.
    """
    _running[child] = False
    guard = MemoryGuard(child.pid, max_memory_mib)
    try:
        return_code = _wait(child, guard, None if timeout_s is None else timeout_s + _GRACE_S)
    except subprocess.TimeoutExpired:
        _kill_group(child)
        late = f"still running {_GRACE_S:g} s after job.timeout_s={timeout_s:g}"
        return conclude(job_dir, Status.TIMEOUT, late)
    except _OverMemoryError as error:
        _kill_group(child)
        return conclude(job_dir, Status.KILLED, str(error), kind="MemoryGuard")
    except KeyboardInterrupt:
        _interrupt(child)
        conclude(job_dir, Status.INTERRUPTED, "interrupted")
        raise
    finally:
        was_interrupted = _running.pop(child)
    if return_code == NO_CUDA_CODE and isinstance(child, ForkedJob):
        raise ServerLostError("its forks cannot use CUDA")
    if was_interrupted:
        return conclude(job_dir, Status.INTERRUPTED, "interrupted")
    return conclude(job_dir, *_reading(return_code))


class _OverMemoryError(Exception):
    """The job's processes hold more memory than they may."""


def _wait(child: Child, guard: MemoryGuard, limit_s: float | None) -> int:
    deadline = math.inf if limit_s is None else time.monotonic() + limit_s
    while True:
        left = deadline - time.monotonic()
        try:
            return child.wait(max(0.0, min(_LOOK_S, left)))
        except subprocess.TimeoutExpired:
            if left <= _LOOK_S:
                raise
            excess = guard.excess()
            if excess is not None:
                raise _OverMemoryError(excess) from None


def interrupt_running() -> None:
    """Tell the children that other threads wait for to end, as Ctrl-C would; returns at once.

    Who does not end in time is killed, and is `interrupted` all the same.
    """
    for child in list(_running):
        _running[child] = True
        _signal_group(child, signal.SIGINT)
    timer = threading.Timer(_INTERRUPT_S, _kill_interrupted)
    timer.daemon = True
    timer.start()


def _kill_interrupted() -> None:
    for child, was_interrupted in list(_running.items()):
        if was_interrupted:
            _signal_group(child, signal.SIGKILL)


def child_environment() -> dict[str, str]:
    """Return the variables of a child. It finds the same harness, also when it was started from a checkout that is not installed."""
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def _signal_group(child: Child, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def _interrupt(child: Child) -> None:
    _signal_group(child, signal.SIGINT)
    try:
        child.wait(_INTERRUPT_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        _kill_group(child)


def _kill_group(child: Child) -> None:
    _signal_group(child, signal.SIGKILL)
    child.wait()


def _reading(return_code: int) -> tuple[Status, str]:
    """Say what a return code means for a child that left no final status."""
    if return_code < 0:
        return Status.KILLED, signal.Signals(-return_code).name
    return Status.FAILED, f"the process ended with code {return_code} before it wrote a status"


def conclude(job_dir: Path, status: Status, reason: str, kind: str | None = None) -> Status:
    """Return the status that the job recorded; if its process died before that, record `status`.

    For `killed`, `reason` is the signal's name, unless a `kind` of its own says who killed it.
    """
    record = JobRecord.attach(job_dir)
    recorded = Status(read_result(job_dir)["status"])
    if recorded is not Status.RUNNING:
        return recorded
    if status is Status.KILLED and kind is None:
        kind, reason = reason, f"the job's process was ended by {reason}"
    error = {"kind": kind or "ProcessDied", "message": reason, "traceback": _tail(job_dir / LOG_FILE)}
    record.update(status=status, error=error)
    with contextlib.suppress(OSError):  # rows that a full disk does not take stay readable as parts
        record.finish_all()
    _publish(job_dir)
    return status


def _publish(job_dir: Path) -> None:
    """Publish what the dead process recorded, in one more child: W&B is not for the parent to import."""
    tracking = (read_result(job_dir)["config"] or {}).get("tracking") or {}
    if tracking.get("mode", "disabled") == "disabled":
        return  # or it died before it had a configuration: there is nothing to show
    with (job_dir / LOG_FILE).open("ab") as log, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [sys.executable, "-m", "harness.tracking", str(job_dir)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=child_environment(),
            timeout=_PUBLISH_S,
            check=False,
        )


def _tail(log: Path, num_lines: int = 40) -> str:
    """The last lines of a log: the nearest thing to a traceback that a dead process leaves."""
    if not log.exists():
        return ""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])


def log_failure(job_dir: Path) -> None:
    """Write the recorded traceback to the job's log, or the message where that says it all."""
    error = read_result(job_dir)["error"]
    if error:
        text = error.get("traceback") or f"error: {error['message']}"
        # A full disk takes no log; the record has the error, too.
        with contextlib.suppress(OSError), (job_dir / LOG_FILE).open("a", encoding="utf-8") as log:
            log.write(f"{text.rstrip()}\n")


def main() -> int:
    """Run the job of the folder named on the command line, in this process."""
    if len(sys.argv) > 2:
        end_with_parent(int(sys.argv[2]))
    from harness.experiment import run_job

    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the sweep was started with `&`
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    job_dir = Path(sys.argv[1])
    status = run_job(job_dir / CONFIG_FILE, job_dir)
    log_failure(job_dir)
    return exit_code(status)


if __name__ == "__main__":
    sys.exit(main())
