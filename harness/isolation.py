"""One child process a job: whatever ends it, the sweep goes on and the job has a status.

The parent imports no torch. The child is `python -m harness.isolation JOB_DIR`; it reads the resolved
`config.yaml` there, and everything that it prints goes to `job.log`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.exit_codes import exit_code
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


#: The children that run now, and whether they were told to end.
_running: dict[subprocess.Popen[bytes], bool] = {}


def run_isolated(
    job_dir: Path, timeout_s: float | None = None, environment: Mapping[str, str] | None = None
) -> Status:
    """Run the job whose `config.yaml` lies in `job_dir` in a process of its own, and return its status.

    `environment` is added to its variables. KeyboardInterrupt passes through once the child has ended and its
    record says so.
    """
    command = [sys.executable, "-m", "harness.isolation", str(job_dir)]
    return run_child(command, job_dir, timeout_s, environment)


def run_child(
    command: Sequence[str],
    job_dir: Path,
    timeout_s: float | None = None,
    environment: Mapping[str, str] | None = None,
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
            env=child_environment() | dict(environment or {}),
        )
        _running[child] = False
        try:
            return_code = child.wait(None if timeout_s is None else timeout_s + _GRACE_S)
        except subprocess.TimeoutExpired:
            _kill_group(child)
            return conclude(
                job_dir, Status.TIMEOUT, f"still running {_GRACE_S:g} s after job.timeout_s={timeout_s:g}"
            )
        except KeyboardInterrupt:
            _interrupt(child)
            conclude(job_dir, Status.INTERRUPTED, "interrupted")
            raise
        finally:
            was_interrupted = _running.pop(child)
    if was_interrupted:
        return conclude(job_dir, Status.INTERRUPTED, "interrupted")
    return conclude(job_dir, *_reading(return_code))


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


def _signal_group(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def _interrupt(child: subprocess.Popen[bytes]) -> None:
    _signal_group(child, signal.SIGINT)
    try:
        child.wait(_INTERRUPT_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        _kill_group(child)


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    _signal_group(child, signal.SIGKILL)
    child.wait()


def _reading(return_code: int) -> tuple[Status, str]:
    """Say what a return code means for a child that left no final status."""
    if return_code < 0:
        return Status.KILLED, signal.Signals(-return_code).name
    return Status.FAILED, f"the process ended with code {return_code} before it wrote a status"


def conclude(job_dir: Path, status: Status, reason: str) -> Status:
    """Return the status that the job recorded; if its process died before that, record `status`.

    For `killed`, `reason` is the signal's name.
    """
    record = JobRecord.attach(job_dir)
    recorded = Status(read_result(job_dir)["status"])
    if recorded is not Status.RUNNING:
        return recorded
    kind = reason if status is Status.KILLED else "ProcessDied"
    message = f"the job's process was ended by {reason}" if status is Status.KILLED else reason
    record.update(
        status=status, error={"kind": kind, "message": message, "traceback": _tail(job_dir / LOG_FILE)}
    )
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
    """Write the recorded traceback to the job's log."""
    error = read_result(job_dir)["error"]
    if error and error.get("traceback"):
        with (job_dir / LOG_FILE).open("a", encoding="utf-8") as log:
            log.write(f"{error['traceback'].rstrip()}\n")


def main() -> int:
    """Run the job of the folder named on the command line, in this process."""
    from harness.experiment import run_job

    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the sweep was started with `&`
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    job_dir = Path(sys.argv[1])
    status = run_job(job_dir / CONFIG_FILE, job_dir)
    log_failure(job_dir)
    return exit_code(status)


if __name__ == "__main__":
    sys.exit(main())
