"""What the end of a cluster's job means for a point that could not say so itself."""

from __future__ import annotations

import signal
import time

from harness.launchers.slurm_queue import GONE, SlurmState
from harness.point import PointTask, conclude_point, row_of_point
from harness.record import Status
from harness.sweep import Row

#: A row that was written on another machine may take so long to be seen here.
_SETTLE_S = 30.0
_POLL_S = 0.5


def conclude_job(task: PointTask, state: SlurmState) -> Row:
    """Return the row of a point whose job has ended; if it has none, it gets the status that `state` stands for."""
    if state.name == "COMPLETED":
        deadline_s = time.monotonic() + _SETTLE_S
        while not _has_ended(row_of_point(task)) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
    elif state == GONE and row_of_point(task) is None:
        # Slurm forgets at once what is cancelled while it waits in its array.
        return conclude_point(task, Status.INTERRUPTED, "cancelled before it began")
    return conclude_point(task, *read_ending(state))


def _has_ended(row: Row | None) -> bool:
    return row is not None and row["status"] != Status.RUNNING


def read_ending(state: SlurmState) -> tuple[Status, str]:
    """Return the status of a point whose job ended with `state` before it recorded one, and the reason.

    As everywhere, the reason of `killed` is one word: the signal, or Slurm's.
    """
    if state.name in ("CANCELLED", "PREEMPTED", "REVOKED"):
        return Status.INTERRUPTED, f"Slurm ended the job: {state.name}"
    if state.name in ("TIMEOUT", "DEADLINE"):
        return Status.TIMEOUT, "Slurm's time limit: raise hydra.launcher.timeout_min, or measure less"
    if state.name in ("NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "GONE"):
        return Status.KILLED, state.name
    if state.exit_code is not None and state.exit_code < 0:
        return Status.KILLED, signal.Signals(-state.exit_code).name
    code = "an unknown code" if state.exit_code is None else f"code {state.exit_code}"
    return Status.FAILED, f"the job's process on the cluster ended with {code} before it wrote a status"
