"""Optuna's side of a search: which points to try next, and which of those tried no other beats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from harness.durable import replace_file
from harness.errors import ConfigError
from harness.search.space import Space
from harness.sweep import SweepFolder
from harness.terminal import say

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial, Trial

RESULTS_FILE = "optimization_results.yaml"
DIRECTIONS = ("minimize", "maximize")
SAMPLERS = ("tpe", "nsga2", "random")
#: How often the sampler may name a point that was tried before one is taken from those left.
_REPEATS = 20


class Search:
    """One search: `ask` for points, run them, `tell` how they came out. Nothing is tried twice."""

    def __init__(
        self,
        space: Space,
        objective: Sequence[str],
        directions: Sequence[str] | None = None,
        sampler: str = "tpe",
        seed: int | None = 0,
        n_trials: int = 20,
    ) -> None:
        """Raises ConfigError for a sampler that is none, or other than one direction for each objective."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space, self.objective = space, tuple(objective)
        self.directions = _checked_directions(self.objective, directions)
        self.study = optuna.create_study(
            directions=list(self.directions), sampler=_sampler(sampler, seed, n_trials)
        )
        self._tried: set[str] = set()
        self._num_asked = 0

    def ask(self, num_trials: int) -> list[Trial]:
        """Return up to `num_trials` points that were not tried; none once all are."""
        trials: list[Trial] = []
        while len(trials) < num_trials and (trial := self._ask_new()) is not None:
            trial.set_user_attr("number", self._num_asked)
            self._num_asked += 1
            trials.append(trial)
        return trials

    def tell(self, trial: Trial, values: Sequence[float]) -> None:
        """Give the values of a job's objective, in its order; NaN is one that it has not, as where it failed."""
        from optuna.trial import TrialState

        if any(math.isnan(value) for value in values):
            self.study.tell(trial, state=TrialState.FAIL)
        else:
            self.study.tell(trial, list(values))

    def _ask_new(self) -> Trial | None:
        from optuna.trial import TrialState

        for _ in range(_REPEATS):
            trial = self.study.ask(self.space.distributions)
            if self._is_new(trial):
                return trial
            self.study.tell(trial, state=TrialState.FAIL)
        left = (point for point in self.space.points() if self._name(point) not in self._tried)
        point = next(left, None)
        if point is None:
            return None
        self.study.enqueue_trial(dict(point))
        trial = self.study.ask(self.space.distributions)
        self._is_new(trial)
        return trial

    def _is_new(self, trial: Trial) -> bool:
        name = self._name(trial.params)
        is_new = name not in self._tried
        self._tried.add(name)
        return is_new

    def _name(self, point: Any) -> str:
        return " ".join(self.space.overrides(point))

    def _jobs(self) -> list[FrozenTrial]:
        return [trial for trial in self.study.trials if "number" in trial.user_attrs]

    def pareto(self) -> list[FrozenTrial]:
        """Return the trials that no other beats in one objective without being worse in another, best first."""
        best = [trial for trial in self.study.best_trials if "number" in trial.user_attrs]
        return sorted(best, key=lambda trial: (trial.values, trial.user_attrs["number"]))

    def results(self, sweep_dir: Path) -> dict[str, Any]:
        """Return what `optimization_results.yaml` holds."""
        rows = {point.number: point.row for point in SweepFolder(sweep_dir).points()}
        jobs = self._jobs()
        return {
            "name": "optuna",
            "objective": list(self.objective),
            "directions": list(self.directions),
            "num_trials": len(jobs),
            "num_failed": sum(trial.values is None for trial in jobs),
            "pareto": [self._entry(trial, rows[trial.user_attrs["number"]]) for trial in self.pareto()],
        }

    def _entry(self, trial: FrozenTrial, row: dict[str, Any]) -> dict[str, Any]:
        values = dict(zip(self.objective, trial.values, strict=True))
        kept = {key: row[key] for key in ("job", "graph_backend", "verified")}
        return kept | {"params": dict(trial.params), "values": values}

    def write(self, sweep_dir: Path) -> None:
        """Write `optimization_results.yaml`: whole at every instant, and as far as the search has come."""
        text = yaml.safe_dump(self.results(sweep_dir), sort_keys=False)
        replace_file(sweep_dir / RESULTS_FILE, text.encode())

    def report(self, sweep_dir: Path) -> None:
        """Print the Pareto set."""
        found = self.results(sweep_dir)
        directions = zip(self.objective, self.directions, strict=True)
        say(
            f"search: {found['num_trials']} job(s), {found['num_failed']} without a value; no job beats these in"
        )
        say("  " + ", ".join(f"{key} ({direction})" for key, direction in directions))
        for entry in found["pareto"]:
            params = " ".join(f"{key}={value}" for key, value in entry["params"].items())
            values = "  ".join(f"{key}={value:.6g}" for key, value in entry["values"].items())
            say(f"  [{entry['job']}] {params}  {values}  ({entry['graph_backend']})")
        say(f"written to {sweep_dir / RESULTS_FILE}")


def _checked_directions(objective: Sequence[str], directions: Sequence[str] | None) -> tuple[str, ...]:
    if directions is None:
        return ("minimize",) * len(objective)
    given = [directions] if isinstance(directions, str) else list(directions)
    if len(given) != len(objective) or any(direction not in DIRECTIONS for direction in given):
        raise ConfigError(
            "hydra.sweeper.directions",
            given,
            f"give minimize or maximize once for each of job.objective ({', '.join(objective)})",
        )
    return tuple(given)


def _sampler(name: str, seed: int | None, n_trials: int) -> BaseSampler:
    from optuna.samplers import NSGAIISampler, RandomSampler, TPESampler

    if name == "tpe":
        # Optuna's own default, 10 random trials first, would leave a short search nothing to learn from.
        return TPESampler(seed=seed, n_startup_trials=min(10, max(1, n_trials // 3)))
    if name == "nsga2":
        return NSGAIISampler(seed=seed, population_size=max(4, min(50, n_trials // 4)))
    if name == "random":
        return RandomSampler(seed=seed)
    raise ConfigError("hydra.sweeper.sampler", name, f"choose one of {', '.join(SAMPLERS)}")
