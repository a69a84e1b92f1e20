"""The Hydra application: composes the jobs that a command line asks for and hands each to be run."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from harness.compose import config_path, register_resolvers, to_yaml
from harness.errors import ConfigError, unwritable
from harness.exit_codes import INTERRUPTED, INVALID, OK, exit_code, sweep_exit_code
from harness.explain import explain
from harness.isolation import CONFIG_FILE, conclude, log_failure, run_isolated
from harness.overrides import FORBIDDEN_KEYS, is_multirun, read_overrides, refuse_foreign_folder
from harness.record import RESULT_FILE, JobRecord, Status
from harness.record_reader import read_result
from harness.schema import check, load_config, register
from harness.sweep import SWEEP_FILE, SweepTable, failure_table
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
    overrides, folders = list(args.overrides), _own_folders(args)  # Hydra adds overrides of its own to these
    task = Task()
    with _errors_raised(), _cancellation_raised():
        try:
            # hydra.main would read sys.argv; this is what it calls.
            _run_hydra(args, parser, task, config_path(), "config")
        except KeyboardInterrupt:
            say("interrupted", sys.stderr)
            task.report()
            return INTERRUPTED
        except Exception as error:
            explained = _explained(error, overrides, folders, task)
            if explained is None:
                raise
            raise explained from error
    return task.report()


def _explained(
    error: Exception, overrides: Sequence[str], folders: Sequence[Path], task: Task
) -> ConfigError | None:
    """Return what Hydra raised as a ConfigError; None once a job has started, for then it is a bug."""
    explained = explain(error, overrides, folders)
    if explained is not None or task.table is not None or task.status is not None:
        return explained
    if isinstance(error, ModuleNotFoundError):
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
    if not args.cfg and not args.info:
        _refuse_used_folder(args.overrides)


def _refuse_used_folder(overrides: Sequence[str]) -> None:
    for override in overrides:
        key, _, value = override.partition("=")
        if key.lstrip("+") != "output_dir":
            continue
        if not value.strip("'\""):
            raise ConfigError("output_dir", value, "name a folder, or leave it out")
        folder = Path(value.strip("'\""))
        for name in (RESULT_FILE, SWEEP_FILE):
            if (folder / name).exists():
                raise ConfigError(
                    "output_dir", value, f"holds a {name} already: give another folder or remove it"
                )


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


@contextmanager
def _cancellation_raised() -> Iterator[None]:
    """Make SIGTERM, by which a cluster cancels, an interrupt: the rows are written before the end.

    And SIGINT, which a script's shell makes commands started with `&` ignore: it is how a sweep is ended.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.default_int_handler) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Task:
    """What Hydra calls once a job. Remembers how the jobs ended."""

    def __init__(self) -> None:
        self.status: Status | None = None
        self.table: SweepTable | None = None
        self.error: Exception | None = None
        self._stopped_by: str | None = None

    def __call__(self, cfg: DictConfig) -> str:
        """Run one composed job and return its status."""
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        hydra = HydraConfig.get()
        job_dir = Path(hydra.runtime.output_dir)
        if hydra.mode == RunMode.MULTIRUN:
            return self._run_point(cfg, job_dir, " ".join(_task_overrides(hydra)))
        try:
            self.status = _run_here(cfg, job_dir)
        except Exception as error:  # Hydra would print its own line about it first.
            self.error = error
        return str(self.status)

    def _run_point(self, cfg: DictConfig, job_dir: Path, overrides: str) -> str:
        """Run one point of a sweep; whatever happens to it is a row."""
        if self.table is None:
            self.table = SweepTable(job_dir.parent)
            say(f"sweep: {self.table.folder}")
        started = time.monotonic()
        say(f"[{job_dir.name}] {overrides}")
        try:
            status = self._isolate(cfg, job_dir)
        except KeyboardInterrupt:
            conclude(job_dir, Status.INTERRUPTED, "interrupted")
            self.table.add(job_dir, overrides, time.monotonic() - started)
            raise
        row = self.table.add(job_dir, overrides, time.monotonic() - started)
        say(f"[{job_dir.name}] {status} after {row['duration_s']:.1f} s")
        if cfg.sweep.stop_on_first_failure and exit_code(status) != OK and self._stopped_by is None:
            self._stopped_by = job_dir.name
        return str(status)

    def _isolate(self, cfg: DictConfig, job_dir: Path) -> Status:
        if self._stopped_by is not None:
            reason = f"job {self._stopped_by} failed and sweep.stop_on_first_failure=true"
            error = {"kind": "Skipped", "message": reason, "traceback": None}
            JobRecord(job_dir).update(status=Status.SKIPPED, error=error)
            return Status.SKIPPED
        try:
            config = _prepare(cfg, job_dir)
            return run_isolated(job_dir, config.job.timeout_s)
        except ConfigError as error:
            return _record_invalid(job_dir, error)
        except Exception as error:
            return _record_failed(job_dir, error)

    def report(self) -> int:
        """Print what failed and return the exit code of all that ran; raises what a single job raised."""
        if self.error is not None:
            raise self.error
        if self.table is not None:
            failed = self.table.failed()
            if failed:
                say(failure_table(failed), sys.stderr)
            say(f"{len(self.table.rows)} row(s) in {self.table.folder / SWEEP_FILE}")
            return sweep_exit_code(self.table.statuses)
        return OK if self.status is None else exit_code(self.status)


def _run_here(cfg: DictConfig, job_dir: Path) -> Status:
    """Run a single job in this process; ConfigError before any weight is loaded."""
    if (job_dir / RESULT_FILE).exists():
        raise ConfigError(
            "output_dir", job_dir, f"holds a {RESULT_FILE} already: give another folder or remove it"
        )
    try:
        _prepare(cfg, job_dir)
    except ConfigError as error:
        _record_invalid(job_dir, error)
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

    hydra = HydraConfig.get()
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
    (job_dir / CONFIG_FILE).write_text(text, encoding="utf-8")
    config = load_config(text)
    check(config)
    return config


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
        changes["tracking.group"] = f"{job_dir.parent.parent.name}/{job_dir.parent.name}"
    return changes


def _record_invalid(job_dir: Path, error: ConfigError) -> Status:
    details = {"kind": type(error).__name__, "message": str(error), "traceback": None}
    JobRecord(job_dir).update(status=Status.INVALID_CONFIG, error=details)
    return Status.INVALID_CONFIG


def _record_failed(job_dir: Path, error: Exception) -> Status:
    details = {"kind": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
    JobRecord.attach(job_dir).update(status=Status.FAILED, error=details)
    return Status.FAILED


def _print_failure(job_dir: Path, status: Status) -> None:
    error = read_result(job_dir)["error"] or {}
    if exit_code(status) == INVALID:
        say(f"error: {error.get('message')}", sys.stderr)
        return
    say(f"{status}: {error.get('kind')}: {error.get('message')}", sys.stderr)
    say(f"log: {job_dir / 'job.log'}", sys.stderr)
