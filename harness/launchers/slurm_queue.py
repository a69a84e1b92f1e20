"""Asks Slurm how its jobs fare, without its accounting: by `squeue`, which knows a job for minutes after its end."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

#: States of a job that may still run, as `squeue --states=all` spells them.
_UNFINISHED = frozenset(
    ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "REQUEUED", "REQUEUE_HOLD",
     "REQUEUE_FED", "RESIZING", "SIGNALING", "STAGE_OUT", "RESV_DEL_HOLD", "SPECIAL_EXIT")
)  # fmt: skip


@dataclass(frozen=True)
class SlurmState:
    """What Slurm says of one job."""

    #: `RUNNING`, `COMPLETED`, `FAILED`, `CANCELLED`, `NODE_FAIL`, …; `GONE` for one that Slurm no longer knows.
    name: str
    #: Exit code of the job's script; negative for a signal; None while it may still run, or where it is not known.
    exit_code: int | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the job will do no more."""
        return self.name not in _UNFINISHED


GONE = SlurmState("GONE")


class SlurmSilentError(RuntimeError):
    """Slurm's controller does not answer; the jobs may well run."""


def ask_squeue(array_id: str) -> dict[str, SlurmState]:
    """Return the state of each job of the submission `array_id`, by id (`7` or `7_0`).

    A job that is not in it has ended long ago. Raises SlurmSilentError if the controller gives no answer.
    """
    asked = subprocess.run(
        ["squeue", "--noheader", "--array", "--states=all", f"--jobs={array_id}",
         "--Format=JobArrayID:64,State:32,exit_code:16"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if asked.returncode != 0:
        if "Invalid job id" in asked.stderr:
            return {}
        raise SlurmSilentError(asked.stderr.strip())
    return dict(_read_line(line) for line in asked.stdout.splitlines() if line.strip())


def _read_line(line: str) -> tuple[str, SlurmState]:
    job_id, name, wait_status = line.split()
    state = SlurmState(name)
    return job_id, SlurmState(name, _exit_code(wait_status)) if state.is_finished else state


def _exit_code(wait_status: str) -> int | None:
    """Read a wait status; a shell ends with 128 + the number of the signal that killed its command."""
    if not wait_status.isdigit():
        return None
    code = os.waitstatus_to_exitcode(int(wait_status))
    return 128 - code if 128 < code <= 128 + 64 else code
