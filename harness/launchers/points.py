"""Between Hydra and a launcher of ours: composes the points here, so that whoever runs them needs no Hydra."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, run_job
from omegaconf import DictConfig, open_dict

from harness.sweep import Row
from harness.sweep_start import refuse_dry_run

if TYPE_CHECKING:
    from hydra.types import HydraContext

    from harness.point import PointTask


@dataclass
class ComposedPoint:
    """A point that a launcher may run anywhere, and what it then tells Hydra's sweeper."""

    task: PointTask
    job: JobReturn

    def ended(self, row: Row) -> JobReturn:
        """Return what the sweeper is told of a point that ended with `row`."""
        from harness.app import returned

        assert self.job.cfg is not None, "Hydra has composed it"
        self.job.return_value = returned(self.job.cfg, row)
        return self.job


def compose_points(
    context: HydraContext, config: DictConfig, job_overrides: Sequence[Sequence[str]], first_number: int
) -> list[ComposedPoint]:
    """Compose a job for each list of overrides, and make its folder; `first_number` is that of the first."""
    points = []
    for number, overrides in enumerate(job_overrides, first_number):
        composed = context.config_loader.load_sweep_config(config, list(overrides))
        refuse_dry_run(composed)
        with open_dict(composed):
            composed.hydra.job.id = composed.hydra.job.num = number
        job = run_job(
            hydra_context=context,
            task_function=_take,
            config=composed,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
            configure_logging=False,
        )
        points.append(ComposedPoint(job.return_value, job))
    return points


def _take(cfg: DictConfig) -> Any:
    from harness.app import point_task

    return point_task(cfg, HydraConfig.get())
