"""What Hydra finds of the harness: it takes launchers and sweepers from modules of `hydra_plugins` only.

NOTE: Hydra imports this at every start: nothing here may import what only a sweep needs.
"""

from __future__ import annotations

from harness.launchers.gpu_launcher import GpuLauncher
from harness.launchers.slurm_launcher import SubmititLauncher, SubmititLocalLauncher
from harness.search.sweeper import SearchSweeper

__all__ = ["JoblibLauncher", "LocalLauncher", "OptunaSweeper", "SlurmLauncher"]


class JoblibLauncher(GpuLauncher):
    """`hydra/launcher=joblib`."""


class SlurmLauncher(SubmititLauncher):
    """`hydra/launcher=submitit_slurm`."""


class LocalLauncher(SubmititLocalLauncher):
    """`hydra/launcher=submitit_local`."""


class OptunaSweeper(SearchSweeper):
    """`hydra/sweeper=optuna`."""
