"""A sweep that Optuna steers: it proposes jobs by how the earlier ones came out, and keeps the Pareto set.

Hydra's own plugin is no choice with today's releases: 1.3.0 pins optuna<3, and 1.4 needs a pre-release of Hydra.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf

from harness.errors import ConfigError
from harness.extras import require_extra
from harness.objective import check_objective

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from hydra.plugins.launcher import Launcher
    from hydra.types import HydraContext, TaskFunction

    from harness.schema import Config
    from harness.search.space import Space


class SearchSweeper(Sweeper):
    """`hydra/sweeper=optuna`. A job is a trial: `job.objective` names what it is judged by, one key or several."""

    def __init__(
        self,
        params: dict[str, Any] | None,
        n_trials: int,
        n_jobs: int,
        sampler: str,
        seed: int | None,
        directions: Sequence[str] | None,
    ) -> None:
        """The values are those of `conf/hydra/sweeper/optuna.yaml`; `setup` checks them."""
        self.params = dict(params or {})
        self.n_trials, self.n_jobs = n_trials, n_jobs
        self.sampler, self.seed, self.directions = sampler, seed, directions
        self.hydra_context: HydraContext | None = None
        self.config: DictConfig | None = None
        self.launcher: Launcher | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra composed; raises ConfigError where the search cannot run."""
        from hydra.core.plugins import Plugins

        require_extra("sweep", ("optuna",), "hydra/sweeper", "optuna")
        for key, value in (("n_trials", self.n_trials), ("n_jobs", self.n_jobs)):
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"hydra.sweeper.{key}", value, "give a whole number, 1 or more")
        if not config.job.objective:
            raise ConfigError(
                "job.objective",
                "[]",
                "say what to search by: job.objective=[steps.mean_decode_ms,capture.graph_mib]",
            )
        check_objective(cast("Config", config))
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> list[JobReturn]:
        """Run the search; returns what each job returned."""
        from harness.search.study import Search

        assert self.config is not None and self.launcher is not None
        space = self._space(arguments)
        self.validate_batch_is_legal([space.overrides(point) for point in space.samples()])
        sweep_dir = Path(self.config.hydra.sweep.dir)
        sweep_dir.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, sweep_dir / "multirun.yaml")
        objective = list(self.config.job.objective)
        search = Search(space, objective, self.directions, self.sampler, self.seed, self.n_trials)
        returns: list[JobReturn] = []
        while trials := search.ask(min(self.n_jobs, self.n_trials - len(returns))):
            batch = [space.overrides(trial.params) for trial in trials]
            ended = self.launcher.launch(batch, initial_job_idx=len(returns))
            for trial, job in zip(trials, ended, strict=True):
                search.tell(trial, _as_list(job.return_value))
            returns += ended
            search.write(sweep_dir)
        search.report(sweep_dir)
        return returns

    def _space(self, arguments: Sequence[str]) -> Space:
        from hydra.core.override_parser.overrides_parser import OverridesParser

        from harness.search.space import read_space

        assert self.hydra_context is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        in_files = [f"{key}={value}" for key, value in self.params.items()]
        return read_space(parser.parse_overrides([*in_files, *arguments]))


def _as_list(objective: float | list[float]) -> list[float]:
    return objective if isinstance(objective, list) else [objective]
