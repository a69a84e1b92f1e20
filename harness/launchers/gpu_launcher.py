"""`hydra/launcher=joblib`: the jobs of a sweep side by side on this machine, each with a GPU for itself."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig

from harness.cancellation import ending_signals
from harness.errors import ConfigError
from harness.extras import require_extra
from harness.isolation import interrupt_running
from harness.launchers.gpu_pool import GpuPool, pool_devices
from harness.launchers.points import ComposedPoint, compose_points
from harness.point import run_aloud

if TYPE_CHECKING:
    from hydra.types import HydraContext, TaskFunction


class GpuLauncher(Launcher):
    """Runs points in threads, each of which waits for the process of one job.

    Threads do: every job is a process of its own anyway. One place, the main thread, hears Ctrl-C.
    """

    def __init__(self, n_jobs: int | None, gpus: Sequence[int | str] | None) -> None:
        """The values are those of `conf/hydra/launcher/joblib.yaml`; `setup` checks them."""
        self.n_jobs, self.gpus = n_jobs, gpus
        self.pool = GpuPool(())
        self.hydra_context: HydraContext | None = None
        self.config: DictConfig | None = None
        self._ended = threading.Event()

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra composed; raises ConfigError where the jobs cannot run so."""
        require_extra("sweep", ("joblib",), "hydra/launcher", "joblib")
        self.hydra_context, self.config = hydra_context, config
        self.pool = GpuPool(pool_devices(self.gpus))
        self.n_jobs = num_jobs(self.n_jobs, self.pool)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run a job for each list of overrides; returns in their order what became of them."""
        from joblib import Parallel, delayed

        assert self.hydra_context is not None and self.config is not None
        points = compose_points(self.hydra_context, self.config, job_overrides, initial_job_idx)
        with self._children_interrupted():
            parallel = Parallel(self.n_jobs, backend="threading", batch_size=1)
            returns: list[JobReturn] = parallel(delayed(self._run)(point) for point in points)
        return returns

    def _run(self, point: ComposedPoint) -> JobReturn:
        with self.pool.lend(self._ended) as device:
            if self._ended.is_set():
                return point.job
            visible = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
            return point.ended(run_aloud(replace(point.task, environment=visible)))

    @contextmanager
    def _children_interrupted(self) -> Iterator[None]:
        """Let what ends the sweep end its jobs first; then raise, once all rows are written."""
        received: list[int] = []

        def end(number: int, frame: FrameType | None) -> None:
            received.append(number)
            self._ended.set()
            interrupt_running()

        with ending_signals(end):
            yield
        if received:
            raise KeyboardInterrupt(f"interrupted by {signal.Signals(received[0]).name}")


def num_jobs(asked: int | None, pool: GpuPool) -> int:
    """Return how many jobs run at once: `hydra.launcher.n_jobs`, by default one a GPU, and one without GPUs."""
    if asked is None:
        return max(1, len(pool.devices))
    if not isinstance(asked, int) or asked < 1:
        raise ConfigError("hydra.launcher.n_jobs", asked, "give a whole number, 1 or more")
    return asked
