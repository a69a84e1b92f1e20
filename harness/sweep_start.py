"""Starts a sweep: settles its folder before the first point, so that every process finds the same one."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from harness.compose import config_path
from harness.errors import ConfigError
from harness.overrides import is_multirun
from harness.sweep import SweepFolder

if TYPE_CHECKING:
    from omegaconf import DictConfig


def open_sweep(args: argparse.Namespace) -> SweepFolder:
    """Start the sweep that a command line asks for, or go on with it, and write its folder into `args`.

    Raises ConfigError where the folder cannot be had, and what Hydra raises for what does not compose.
    """
    from omegaconf import OmegaConf

    _refuse_swept(args.overrides)
    config = _compose(args, many=True)
    _check_id(config.sweep.id)
    raw = cast(dict[str, Any], OmegaConf.to_container(config.hydra.sweep, resolve=False))
    subdir = str(raw["subdir"])
    if "/" in subdir or subdir in (".", ".."):
        raise ConfigError("hydra.sweep.subdir", subdir, "give the name of one folder, without /")
    sweep = SweepFolder(Path(os.path.abspath(config.hydra.sweep.dir)))
    is_started = sweep.is_started()
    if config.sweep.resume and not is_started and config.sweep.id is None:
        raise ConfigError(
            "sweep.resume",
            True,
            "which sweep? add sweep.id=NAME, or output_dir=FOLDER with the folder that holds its sweep.csv",
        )
    sweep.open(resume=bool(config.sweep.resume) and is_started)
    args.overrides.append(f"hydra.sweep.dir={_quoted(sweep.folder)}")
    return sweep


def _check_id(name: str | None) -> None:
    if name is not None and (not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", name) or ".." in name.split("/")):
        raise ConfigError(
            "sweep.id", name, "give a name of letters, digits, . _ and -: its folder is outputs/NAME"
        )


def mentions_dry_run(args: argparse.Namespace) -> bool:
    """Return whether the command line asks for a dry run."""
    words = [text.lstrip("+").partition("=") for text in args.overrides]
    asked = [value.lower() for key, _, value in words if key == "sweep.dry_run"]
    return bool(asked) and asked[-1] in ("true", "on", "yes", "1")


def refuse_dry_run(config: DictConfig) -> None:
    """Raise ConfigError for a composed job that asks for a dry run: it is too late for one."""
    if config.sweep.dry_run:
        raise ConfigError("sweep.dry_run", True, "is read on the command line: leave it out of the file")


def redirect(args: argparse.Namespace, folder: Path) -> SweepFolder | None:
    """Let Hydra write into `folder` and run nothing; return the sweep that the command line would go on with."""
    _refuse_swept(args.overrides)
    many = is_multirun(args.overrides, args.multirun)
    config = _compose(args, many)
    if many and not str(config.hydra.sweeper._target_).endswith(".BasicSweeper"):
        raise ConfigError(
            "sweep.dry_run", True, "a search chooses its points as it goes: leave the sweeper out"
        )
    args.overrides += [f"hydra.{mode}.dir={_quoted(folder)}" for mode in ("run", "sweep")]
    if many:
        args.overrides.append("hydra/launcher=basic")
    sweep = SweepFolder(Path(os.path.abspath(config.hydra.sweep.dir)))
    return sweep if many and config.sweep.resume and sweep.is_started() else None


def _refuse_swept(overrides: Sequence[str]) -> None:
    """Raise ConfigError for a sweep over what all its points share."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    for text in overrides:
        override = parser.parse_overrides([text])[0]
        key = override.key_or_group
        if (key == "output_dir" or key.startswith("sweep.")) and override.is_sweep_override():
            raise ConfigError(key, text.partition("=")[2], "is the same for all jobs: give one value")


def _compose(args: argparse.Namespace, many: bool) -> DictConfig:
    """Return what Hydra composes first; for a sweep the configuration of no point, without what is swept."""
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_automatic_config_search_path
    from hydra.core.config_search_path import SearchPathQuery
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    path = create_automatic_config_search_path(None, None, args.config_path or config_path())
    if args.config_dir is not None:
        folder = os.path.abspath(args.config_dir)
        path.prepend(
            provider="command-line", path=f"file://{folder}", anchor=SearchPathQuery(provider="schema")
        )
    hydra = Hydra.create_main_hydra2(task_name="harness", config_search_path=path)
    mode = RunMode.MULTIRUN if many else RunMode.RUN
    try:
        return hydra.compose_config(
            args.config_name or "config", [*args.overrides, f"hydra.mode={mode.name}"], run_mode=mode
        )
    finally:
        GlobalHydra.instance().clear()


def _quoted(path: Path) -> str:
    """Return a path as the value of an override."""
    text = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"
