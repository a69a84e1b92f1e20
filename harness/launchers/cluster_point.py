"""What runs inside a job of a cluster: one point, and the signals by which a cluster ends it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from harness.cancellation import CancelledError, cancellation_raised
from harness.launchers.gpu_pool import GpuPool
from harness.point import PointTask, conclude_point, run_aloud
from harness.record import Status


class TimeLimitError(KeyboardInterrupt):
    """The cluster is about to end the job, as its time is up."""


def run_cluster_point(task: PointTask, pool: GpuPool) -> None:
    """Run a point; `pool` lends its GPU where the cluster does not.

    Only what is told to end by the cluster gets its status here: a job that is killed says nothing, and whoever
    submitted it concludes it.
    """
    with cancellation_raised(), _time_limit_raised():
        try:
            with pool.lend() as device:
                visible = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
                run_aloud(replace(task, environment=visible))
        except TimeLimitError as error:
            conclude_point(task, Status.TIMEOUT, str(error))
        except CancelledError as error:
            conclude_point(task, Status.INTERRUPTED, str(error))


@contextmanager
def _time_limit_raised() -> Iterator[None]:
    """Raise TimeLimitError for SIGUSR2 inside the block, in place of submitit's own handler, which would run it again."""
    before = signal.signal(signal.SIGUSR2, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR2, before)


def _raise(number: int, frame: FrameType | None) -> None:
    raise TimeLimitError(
        "the cluster's time for the job is up: raise hydra.launcher.timeout_min, or measure less"
    )
