"""The Hydra application: composes the jobs that a command line asks for and hands each to be run."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from harness.cancellation import CancelledError, cancellation_raised
from harness.compose import config_path, register_presets, register_resolvers, to_yaml
from harness.errors import ConfigError, RecordError, unwritable, used_folder
from harness.exit_codes import INTERRUPTED, INVALID, OK, exit_code, sweep_exit_code
from harness.explain import explain
from harness.isolation import CONFIG_FILE, log_failure
from harness.objective import objective_value
from harness.overrides import FORBIDDEN_KEYS, is_multirun, read_overrides, refuse_foreign_folder
from harness.point import PointTask, record_error, run_aloud, settle_lost
from harness.record import RESULT_FILE, Status
from harness.record_reader import read_result
from harness.schema import check, load_config, register
from harness.sweep import SWEEP_FILE, Row, SweepFolder, failure_table, has_failed
from harness.sweep_start import mentions_dry_run, open_sweep, redirect, refuse_dry_run
from harness.terminal import say

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from harness.schema import Config

#: Groups whose choice becomes a W&B tag.
_TAGGED_GROUPS = (
    "model",
    "attention",
    "runner",
    "capture",
    "padding",
    "compile",
    "workload",
    "measure",
    "experiment",
)


def run_app(argv: Sequence[str]) -> int:
    """Run what `argv` (without the program's name) asks of Hydra and return the exit code.

    A job runs in this process, the jobs of a sweep in one child each. ConfigError is for the caller.
    """
    from hydra import version
    from hydra._internal.utils import _run_hydra, get_args_parser

    parser = get_args_parser()
    parser.prog = "cudagraph-harness"
    args = parser.parse_intermixed_args(list(argv))
    version.setbase("1.3")
    if not args.shell_completion:
        _read_arguments(args)
    register()
    register_resolvers()
    register_presets()
    overrides, folders = list(args.overrides), _own_folders(args)  # Hydra adds overrides of its own to these
    task, sweep = Task(), None
    with _errors_raised(), cancellation_raised():
        try:
            if not _asks_only(args) and mentions_dry_run(args):
                return _look(args, parser)
            if not _asks_only(args) and is_multirun(args.overrides, args.multirun):
                sweep = open_sweep(args)
                say(f"sweep: {sweep.folder}")
            # hydra.main would read sys.argv; this is what it calls.
            _run_hydra(args, parser, task, config_path(), "config")
        except KeyboardInterrupt:
            say("interrupted", sys.stderr)
            task.report(sweep)
            return INTERRUPTED
        except Exception as error:
            has_begun = task.status is not None or (sweep is not None and bool(sweep.rows()))
            if sweep is not None and not has_begun:
                sweep.discard()
            explained = _explained(error, overrides, folders, has_begun)
            if explained is None:
                raise
            raise explained from error
    return task.report(sweep)


def _asks_only(args: argparse.Namespace) -> bool:
    return bool(args.cfg or args.info or args.shell_completion or args.help or args.hydra_help)


def _look(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Compose every job of a dry run, in a folder that is then removed, and say what each would be."""
    from hydra._internal.utils import _run_hydra
    from hydra.core.hydra_config import HydraConfig

    from harness.dry_run import DryRun

    with tempfile.TemporaryDirectory() as folder:
        dry_run = DryRun(redirect(args, Path(folder)))
        _run_hydra(
            args,
            parser,
            lambda cfg: dry_run.look_at(point_task(cfg, HydraConfig.get())),
            config_path(),
            "config",
        )
    return dry_run.report()


def _explained(
    error: Exception, overrides: Sequence[str], folders: Sequence[Path], has_begun: bool
) -> ConfigError | None:
    """Return what Hydra raised as a ConfigError; None for what says all itself, and once a job has started, for
    then it is a bug."""
    explained = explain(error, overrides, folders)
    if explained is not None or has_begun:
        return explained
    if isinstance(error, ModuleNotFoundError | RecordError):
        return None
    if isinstance(error, OSError) and error.filename is not None:
        return unwritable(error.filename, error)
    reason = next(iter(str(error).splitlines()), "no reason given")
    return ConfigError(
        "command line", " ".join(overrides), f"does not compose ({type(error).__name__}: {reason})"
    )


def _own_folders(args: argparse.Namespace) -> list[Path]:
    given = (folder for folder in (args.config_dir, args.config_path) if folder is not None)
    return [Path(os.path.abspath(folder)) for folder in given]  # as Hydra names their files


def _read_arguments(args: argparse.Namespace) -> None:
    """Refuse what no command line may ask for, and rewrite list fields."""
    if args.experimental_rerun is not None:
        raise ConfigError(
            "--experimental-rerun", args.experimental_rerun, "not used here: give the overrides again"
        )
    for option, folder in (("--config-dir", args.config_dir), ("--config-path", args.config_path)):
        if folder is not None:
            refuse_foreign_folder(option, Path(folder))
    multirun = is_multirun(args.overrides, args.multirun)
    args.overrides = read_overrides(args.overrides, multirun)
    if not args.cfg and not args.info and not multirun:
        _refuse_used_folder(args.overrides)


def _refuse_used_folder(overrides: Sequence[str]) -> None:
    for override in overrides:
        key, _, value = override.partition("=")
        if key.lstrip("+") != "output_dir":
            continue
        if not value.strip("'\""):
            raise ConfigError("output_dir", value, "name a folder, or leave it out")
        folder = Path(value.strip("'\""))
        if any((folder / name).exists() for name in (RESULT_FILE, SWEEP_FILE)):
            raise used_folder(value)


@contextmanager
def _errors_raised() -> Iterator[None]:
    """Make Hydra raise its errors instead of printing them and exiting with 1."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


class Task:
    """What Hydra calls once a job. In a sweep it may be pickled and called in another process."""

    def __init__(self) -> None:
        self.status: Status | None = None
        self.error: Exception | None = None
        self._is_worker = False

    def __getstate__(self) -> dict[str, Any]:
        return {"status": None, "error": None, "_is_worker": True}

    def __call__(self, cfg: DictConfig) -> Any:
        """Run one composed job and return its status."""
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        hydra = HydraConfig.get()
        job_dir = Path(hydra.runtime.output_dir)
        refuse_dry_run(cfg)
        if hydra.mode == RunMode.MULTIRUN:
            return self._run_point(cfg, hydra)
        try:
            self.status = _run_here(cfg, job_dir)
        except Exception as error:  # Hydra would print its own line about it first.
            self.error = error
        return str(self.status)

    def _run_point(self, cfg: DictConfig, hydra: Any) -> Any:
        """Run one point of a sweep, whatever happens to it is a row; return its objective, or its status."""
        register_resolvers()
        task = point_task(cfg, hydra)
        try:
            with cancellation_raised():
                row = run_aloud(task)
        except CancelledError:
            if not self._is_worker:
                raise
            return returned(cfg, None)
        except KeyboardInterrupt:
            SweepFolder(task.sweep_dir).stop("the sweep was interrupted")
            raise
        return returned(cfg, row)

    def report(self, sweep: SweepFolder | None) -> int:
        """Print what failed and return the exit code of all that ran; raises what a single job raised."""
        if self.error is not None:
            raise self.error
        if sweep is None:
            return OK if self.status is None else exit_code(self.status)
        settle_lost(sweep)
        rows = sweep.rows()
        failed = [row for row in rows if has_failed(row)]
        if failed:
            say(failure_table(failed), sys.stderr)
        say(f"{len(rows)} row(s) in {sweep.folder / SWEEP_FILE}")
        return sweep_exit_code(Status(row["status"]) for row in rows)


def point_task(cfg: DictConfig, hydra: Any) -> PointTask:
    """Return what `run_point` needs to run a composed point; `hydra` is Hydra's part of it."""
    from hydra.types import RunMode

    job_dir, sweep_dir = Path(hydra.runtime.output_dir), Path(hydra.sweep.dir)
    is_point = hydra.mode == RunMode.MULTIRUN
    if is_point and job_dir.parent != sweep_dir:
        raise ConfigError("hydra.sweep.subdir", hydra.sweep.subdir, "give the name of one folder, without /")
    try:
        configuration: str | ConfigError = _resolved(cfg, job_dir, hydra)
    except ConfigError as error:
        configuration = error
    return PointTask(
        sweep_dir=sweep_dir,
        job_dir=job_dir,
        number=int(hydra.job.num) if is_point else 0,
        overrides=" ".join(text for text in _task_overrides(hydra) if not text.startswith("sweep.")),
        configuration=configuration,
        stops_on_failure=bool(_value(cfg, "sweep", "stop_on_first_failure", False)),
    )


def _value(cfg: DictConfig, section: str, key: str, otherwise: Any) -> Any:
    """Return `section.key`; `otherwise` where it cannot be read, which the configuration's check says."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    given = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=False)).get(section)
    try:
        return cfg[section].get(key, otherwise) if isinstance(given, dict) else otherwise
    except OmegaConfBaseException:
        return otherwise


def returned(cfg: DictConfig, row: Row | None) -> Any:
    """Return what the sweeper is to hear of a point; `row` is None for one that was cancelled."""
    names = list(_value(cfg, "job", "objective", None) or ())
    if names:
        return objective_value(None if row is None else Path(row["job_dir"]), names)
    return str(Status.INTERRUPTED if row is None else row["status"])


def _run_here(cfg: DictConfig, job_dir: Path) -> Status:
    """Run a single job in this process; ConfigError before any weight is loaded."""
    name = _value(cfg, "sweep", "id", None)
    if name is not None or _value(cfg, "sweep", "resume", False) is True:
        raise ConfigError("sweep.id", name, "names a sweep, and sweep.resume goes on with one: add -m")
    if (job_dir / RESULT_FILE).exists():
        raise used_folder(job_dir)
    try:
        _prepare(cfg, job_dir)
    except ConfigError as error:
        record_error(job_dir, Status.INVALID_CONFIG, error)
        raise
    from harness.experiment import run_job

    status = run_job(job_dir / CONFIG_FILE, job_dir)
    if exit_code(status) != OK:
        log_failure(job_dir)
        _print_failure(job_dir, status)
    return status


def _prepare(cfg: DictConfig, job_dir: Path) -> Config:
    """Write the job's resolved `config.yaml` and return it, checked."""
    from hydra.core.hydra_config import HydraConfig

    text = _resolved(cfg, job_dir, HydraConfig.get())
    (job_dir / CONFIG_FILE).write_text(text, encoding="utf-8")
    config = load_config(text)
    check(config)
    return config


def _resolved(cfg: DictConfig, job_dir: Path, hydra: Any) -> str:
    """Return the job's configuration as YAML, every interpolation resolved; ConfigError if one cannot be."""
    try:
        text = to_yaml(cfg, _filled_in(cfg, job_dir, hydra))
    except Exception as error:
        explained = explain(error, _task_overrides(hydra))
        if explained is None:
            raise
        raise explained from error
    for word in FORBIDDEN_KEYS:
        if word in text:
            raise ConfigError(word, "", "a configuration may not name Python objects: remove it")
    return text


def _task_overrides(hydra: Any) -> list[str]:
    """Return the overrides of the job as they were written, `${...}` unresolved."""
    from omegaconf import OmegaConf

    return list(map(str, cast(list[Any], OmegaConf.to_container(hydra.overrides.task, resolve=False))))


def _filled_in(cfg: DictConfig, job_dir: Path, hydra: Any) -> dict[str, Any]:
    """Return the values that only the composition knows: the job's folder, W&B tags and group."""
    from hydra.types import RunMode

    choices = hydra.runtime.choices
    tags = [f"{group}={choices[group]}" for group in _TAGGED_GROUPS if choices.get(group)]
    changes: dict[str, Any] = {
        "output_dir": str(job_dir),
        "tracking.tags": [*cfg.tracking.tags, *(tag for tag in tags if tag not in cfg.tracking.tags)],
    }
    if hydra.mode == RunMode.MULTIRUN and cfg.tracking.group is None:
        changes["tracking.group"] = cfg.sweep.id or f"{job_dir.parent.parent.name}/{job_dir.parent.name}"
    return changes


def _print_failure(job_dir: Path, status: Status) -> None:
    error = read_result(job_dir)["error"] or {}
    if exit_code(status) == INVALID:
        say(f"error: {error.get('message')}", sys.stderr)
        return
    say(f"{status}: {error.get('kind')}: {error.get('message')}", sys.stderr)
    say(f"log: {job_dir / 'job.log'}", sys.stderr)
