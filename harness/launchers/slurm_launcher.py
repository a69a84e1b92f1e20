"""`hydra/launcher=submitit_slurm` and `submitit_local`: each job of a sweep is a job of a cluster."""

from __future__ import annotations

import os
import shutil
import sys
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf

from harness.errors import ConfigError
from harness.extras import require_extra
from harness.isolation import child_environment
from harness.launchers.endings import conclude_job
from harness.launchers.gpu_launcher import num_jobs
from harness.launchers.gpu_pool import GpuPool, pool_devices
from harness.launchers.points import ComposedPoint, compose_points
from harness.launchers.slurm_queue import SlurmSilentError, SlurmState
from harness.terminal import say

if TYPE_CHECKING:
    from hydra.types import HydraContext, TaskFunction

    from harness.launchers.cluster import Cluster

#: Between two looks at the cluster: soon after the submission, and once jobs take their time.
_POLL_S = (1.0, 15.0)
#: How long jobs may take to end once they are cancelled: Slurm's KillWait is 30 s.
_CANCEL_S = 60.0


class ClusterLauncher(Launcher):
    """Submits the points, waits until each has ended, however it did, and sees that each has its row.

    The jobs write their rows themselves, so that they go on without the one that submitted them.
    """

    #: Its name as a choice of `hydra/launcher`.
    choice: str

    def __init__(self, submitit_folder: str, **options: Any) -> None:
        """The values are those of `conf/hydra/launcher/<choice>.yaml`."""
        self.folder = submitit_folder
        self.options: dict[str, Any] = {
            key: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
            for key, value in options.items()
        }
        self.hydra_context: HydraContext | None = None
        self.config: DictConfig | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra composed; raises ConfigError where the jobs cannot run so."""
        require_extra("sweep", ("submitit",), "hydra/launcher", self.choice)
        self.hydra_context, self.config = hydra_context, config
        self.cluster = self._cluster()

    @abstractmethod
    def _cluster(self) -> Cluster:
        """Return where the jobs are submitted."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run a job for each list of overrides; returns in their order what became of them."""
        assert self.hydra_context is not None and self.config is not None
        points = compose_points(self.hydra_context, self.config, job_overrides, initial_job_idx)
        # Where the harness is a checkout that is not installed, the jobs must find it too.
        os.environ["PYTHONPATH"] = child_environment()["PYTHONPATH"]
        watch = _Watch(self.cluster, points)
        try:
            watch.run()
        except KeyboardInterrupt:
            watch.cancel()
            raise
        return [point.job for point in points]


class _Watch:
    """Points on their way through a cluster."""

    def __init__(self, cluster: Cluster, points: Sequence[ComposedPoint]) -> None:
        self.cluster = cluster
        self.waiting = deque(points)
        self.running: dict[str, ComposedPoint] = {}
        self._told_silence = False

    def run(self) -> None:
        """Submit all points and return once all have ended."""
        started_s = time.monotonic()
        while self.waiting or self.running:
            self._submit()
            time.sleep(min(max((time.monotonic() - started_s) / 20, _POLL_S[0]), _POLL_S[1]))
            self._collect()

    def cancel(self) -> None:
        """End the jobs that have not ended, and give each that was submitted its row."""
        self.cluster.cancel(list(self.running))
        deadline_s = time.monotonic() + _CANCEL_S
        while self.running and time.monotonic() < deadline_s:
            time.sleep(_POLL_S[0])
            self._collect()
        for point in self.running.values():
            conclude_job(point.task, SlurmState("CANCELLED"))

    def _submit(self) -> None:
        num_free = self.cluster.num_free(len(self.running))
        num = len(self.waiting) if num_free is None else min(num_free, len(self.waiting))
        if num == 0:
            return
        points = [self.waiting.popleft() for _ in range(num)]
        job_ids = self.cluster.submit([point.task for point in points])
        for job_id, point in zip(job_ids, points, strict=True):
            say(f"[{point.task.job_dir.name}] {point.task.overrides}  (job {job_id})")
        self.running |= dict(zip(job_ids, points, strict=True))

    def _collect(self) -> None:
        try:
            states = self.cluster.states(list(self.running))
        except SlurmSilentError as error:
            if not self._told_silence:
                say(
                    f"Slurm does not answer ({error}); still waiting for {len(self.running)} job(s)",
                    sys.stderr,
                )
            self._told_silence = True
            return
        self._told_silence = False
        for job_id, state in states.items():
            if state.is_finished:
                point = self.running.pop(job_id)
                row = conclude_job(point.task, state)
                say(f"[{row['job']}] {row['status']}")
                point.ended(row)


class SubmititLauncher(ClusterLauncher):
    """Slurm."""

    choice = "submitit_slurm"

    def _cluster(self) -> Cluster:
        from harness.launchers.cluster import SlurmCluster

        if shutil.which("sbatch") is None:
            raise ConfigError(
                "hydra/launcher",
                self.choice,
                "there is no sbatch here: start the sweep on a login node of a Slurm",
            )
        return SlurmCluster(self.folder, self.options)


class SubmititLocalLauncher(ClusterLauncher):
    """The same on this machine."""

    choice = "submitit_local"

    def _cluster(self) -> Cluster:
        from harness.launchers.cluster import LocalCluster

        pool = GpuPool(pool_devices(self.options["gpus"]))
        return LocalCluster(self.folder, pool, num_jobs(self.options["n_jobs"], pool))
