"""Finds the configuration folder and composes a job from it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.model_cache import cached_model

if TYPE_CHECKING:
    from omegaconf import DictConfig

#: Group of `conf/hydra` → its choices, each with the class that Hydra makes of it; no YAML names a class.
_PRESETS = {
    "launcher": {
        "basic": "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
        "joblib": "hydra_plugins.cudagraph_harness.JoblibLauncher",
        "submitit_local": "hydra_plugins.cudagraph_harness.LocalLauncher",
        "submitit_slurm": "hydra_plugins.cudagraph_harness.SlurmLauncher",
    },
    "sweeper": {
        "basic": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
        "optuna": "hydra_plugins.cudagraph_harness.OptunaSweeper",
    },
}
_CHECKOUT = Path(__file__).resolve().parent.parent / "conf"
#: NOTE: `harness.conf` also resolves through an editable install of another checkout; only a folder inside
#: this very package is that of a wheel.
_IN_WHEEL = Path(__file__).resolve().parent / "conf"


def config_path() -> str:
    """Return where Hydra finds the groups: inside the installed package, else in the checkout beside it."""
    return "pkg://harness.conf" if _IN_WHEEL.is_dir() else str(_CHECKOUT)


def config_folder() -> Traversable:
    """Return the folder of `config_path` for reading."""
    return resources.files("harness.conf") if _IN_WHEEL.is_dir() else _CHECKOUT


def group_choices(group: str) -> list[str]:
    """Return the choices of a group; none if there is no such group."""
    folder = config_folder().joinpath(group)
    if not folder.is_dir():
        return []
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def group_names() -> list[str]:
    """Return the names of the groups."""
    return sorted(folder.name for folder in config_folder().iterdir() if group_choices(folder.name))


def register_resolvers() -> None:
    """Register `${start_name:ID}`, the name of a start's folder, and `${cached_model:NAME}`, where its weights lie."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("start_name", _start_name, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("cached_model", lambda name: str(cached_model(name)), replace=True)


def _start_name(sweep_id: str | None) -> str:
    """Return `sweep_id`, or the time and what no other start has."""
    return sweep_id or f"{datetime.now():%Y-%m-%d/%H-%M-%S}-{secrets.token_hex(4)}"


def register_presets() -> None:
    """Give the choices of `conf/hydra` their classes, and let them have their names for themselves.

    A plugin of Hydra's that is installed may offer a choice of the same name, which Hydra would take for the schema
    of ours.
    """
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

    from hydra_plugins import cudagraph_harness

    plugins, store = Plugins.instance(), ConfigStore.instance()
    for name in cudagraph_harness.__all__:
        # Hydra's own search does not see into an editable install.
        plugins.register(getattr(cudagraph_harness, name))
    for group, classes in _PRESETS.items():
        offered = store.repo["hydra"][group]
        for choice, target in classes.items():
            offered.pop(f"{choice}.yaml", None)
            store.store(f"{choice}_class", {"_target_": target}, group=f"hydra/{group}", provider="harness")


def compose(overrides: Sequence[str] = ()) -> str:
    """Return the configuration that `python -m harness OVERRIDES` would run, resolved, as YAML.

    For tests, benchmarks and scripts: `run_job(compose(["capture=all"]), job_dir)`.
    """
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    from harness.overrides import read_overrides
    from harness.schema import register

    register()
    register_resolvers()
    register_presets()
    GlobalHydra.instance().clear()
    path = config_path()
    opened = (
        hydra.initialize_config_module("harness.conf", version_base="1.3")
        if path.startswith("pkg://")
        else hydra.initialize_config_dir(path, version_base="1.3")
    )
    with opened:
        return to_yaml(hydra.compose("config", overrides=read_overrides(overrides, multirun=False)))


def _identify_model(model: DictConfig) -> None:
    """Drop a preset's name and shape where the weights are not the preset's: they say nothing of a checkpoint."""
    if model.source == "random" or not model.path:
        return
    path = Path(str(model.path)).expanduser()
    model.config = {}
    if model.name in group_choices("model") and path != cached_model(model.name):
        model.name = path.stem if path.suffix == ".gguf" else path.resolve().name


def to_yaml(config: DictConfig, changes: Mapping[str, Any] | None = None) -> str:
    """Return the composed configuration with every interpolation resolved, as YAML.

    `changes` are dotted keys that are set first. Raises OmegaConf's errors for what does not resolve.
    """
    from omegaconf import OmegaConf, open_dict

    with open_dict(config):
        for key, value in (changes or {}).items():
            OmegaConf.update(config, key, value)
        _identify_model(config.model)
    return OmegaConf.to_yaml(
        OmegaConf.create(OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
    )
