"""What a launcher needs of a cluster, and Slurm as one. Jobs are submitted by submitit, and watched by us:

submitit waits for good for a job that dies where Slurm keeps no accounting.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from harness.errors import ConfigError
from harness.launchers.cluster_point import run_cluster_point
from harness.launchers.gpu_pool import GpuPool
from harness.launchers.slurm_queue import GONE, SlurmState, ask_squeue
from harness.point import PointTask


class Cluster(Protocol):
    """Runs points as jobs of their own."""

    def submit(self, tasks: Sequence[PointTask]) -> list[str]:
        """Return the id of the job of each point, in their order."""

    def states(self, job_ids: Sequence[str]) -> dict[str, SlurmState]:
        """Return how each job fares; raises SlurmSilentError if nobody can say just now."""

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Ask the jobs to end."""

    def num_free(self, num_unfinished: int) -> int | None:
        """Return how many more jobs may be submitted while so many have not ended; None for any number."""


class SlurmCluster:
    """Slurm: one job array for all points, so that Slurm decides how many run at once."""

    def __init__(self, folder: str, options: Mapping[str, Any]) -> None:
        """`options` are those of `conf/hydra/launcher/submitit_slurm.yaml`; ConfigError for one that submitit refuses."""
        import submitit

        self._executor = submitit.SlurmExecutor(folder=folder, max_num_timeout=0)
        try:
            self._executor.update_parameters(**_slurm_parameters(options))
        except (ValueError, TypeError) as error:
            raise ConfigError("hydra.launcher", "...", str(error)) from error

    def submit(self, tasks: Sequence[PointTask]) -> list[str]:
        """Submit all points as one array; ConfigError with Slurm's words if it refuses them."""
        from submitit.core.utils import FailedJobError

        try:
            jobs = self._executor.map_array(run_cluster_point, tasks, [GpuPool(())] * len(tasks))
        except FailedJobError as error:
            raise ConfigError(
                "hydra/launcher", "submitit_slurm", f"Slurm takes no such job ({error}): see hydra.launcher.*"
            ) from error
        return [str(job.job_id) for job in jobs]

    def states(self, job_ids: Sequence[str]) -> dict[str, SlurmState]:
        """Ask squeue, once for each array."""
        known: dict[str, SlurmState] = {}
        for array in {_array(job_id) for job_id in job_ids}:
            known |= ask_squeue(array)
        return {job_id: known.get(job_id, GONE) for job_id in job_ids}

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel the jobs: SIGTERM now, SIGKILL after Slurm's KillWait."""
        subprocess.run(["scancel", *job_ids], capture_output=True, check=False)

    def num_free(self, num_unfinished: int) -> int | None:
        """Slurm queues any number."""
        return None


def _array(job_id: str) -> str:
    return job_id.partition("_")[0]


def _slurm_parameters(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options by submitit's names, without those that are left to the cluster."""
    names = {"name": "job_name", "timeout_min": "time", "mem_gb": "mem"}
    given = {names.get(key, key): value for key, value in options.items() if value is not None}
    if "mem" in given:
        given["mem"] = f"{given['mem']}GB"
    return given


class LocalCluster:
    """Submitit's processes on this machine, `n_jobs` at a time."""

    def __init__(self, folder: str, pool: GpuPool, n_jobs: int) -> None:
        """The GPUs of `pool` are lent to the jobs, one to each."""
        import submitit

        self._executor = submitit.LocalExecutor(folder=Path(folder), max_num_timeout=0)
        self._executor.update_parameters(timeout_min=_NO_LIMIT_MIN)
        self._pool, self._n_jobs = pool, n_jobs
        self._jobs: dict[str, Any] = {}

    def submit(self, tasks: Sequence[PointTask]) -> list[str]:
        """Start a process for each point."""
        jobs = [self._executor.submit(run_cluster_point, task, self._pool) for task in tasks]
        self._jobs |= {job.job_id: job for job in jobs}
        return [str(job.job_id) for job in jobs]

    def states(self, job_ids: Sequence[str]) -> dict[str, SlurmState]:
        """Look which processes have ended. A dead one has no exit code: submitit's controller takes it."""
        return {
            job_id: SlurmState("FAILED" if self._jobs[job_id].done() else "RUNNING") for job_id in job_ids
        }

    def cancel(self, job_ids: Sequence[str]) -> None:
        """End the processes, as scancel would."""
        for job_id in job_ids:
            self._jobs[job_id]._process.terminate()

    def num_free(self, num_unfinished: int) -> int | None:
        """As many as may run at once, less those that do."""
        return self._n_jobs - num_unfinished


#: Submitit needs a limit; `job.timeout_s` is ours. A week.
_NO_LIMIT_MIN = 7 * 24 * 60
