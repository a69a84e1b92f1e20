"""`python -m harness` and `cudagraph-harness`: a verb, or else the Hydra application. Owns the exit codes."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from harness.errors import ConfigError, RecordError

_FAILED = 1
_INVALID = 2
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0 ok, 1 failed, 2 invalid, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except (ConfigError, RecordError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _INVALID
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has seen enough (`| head`); what is left in the buffer has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"error: {error.strerror}: make room; a sweep goes on with sweep.resume=true", file=sys.stderr)
        return _FAILED
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "harness", "runners"):
            raise
        print(f"error: {_without(missing)}", file=sys.stderr)
        return _INVALID


def _dispatch(arguments: list[str]) -> int:
    verb = arguments[0] if arguments else ""
    if verb in _COMMANDS:
        return _COMMANDS[verb](arguments[1:])
    if verb and not verb.startswith(("-", "+", "~")) and "=" not in verb:
        _refuse_word(verb)
    return _run(arguments)


def _run(arguments: list[str]) -> int:
    if any(argument in ("-h", "--help") for argument in arguments):
        from harness.help import help_text

        print(help_text(), end="")
        return 0
    if "--version" in arguments:
        from importlib.metadata import version

        print(f"cudagraph-harness {version('cudagraph-harness')}")
        return 0
    from harness.app import run_app

    return run_app(arguments)


def _without(package: str) -> str:
    """Say in a line why a dependency is not there, and what to do."""
    return (
        f"{sys.executable} has no package {package}: in a checkout, run `make run` once and then "
        "`. .venv/bin/activate`; else `pip install cudagraph-harness`. `python -m harness doctor` lists all that lacks"
    )


def _verb(module: str, function: str) -> Callable[[list[str]], int]:
    """Return a verb whose module is imported when it is used: no verb pays for another."""

    def run(arguments: list[str]) -> int:
        return int(getattr(importlib.import_module(module), function)(arguments))

    return run


def _refuse_word(word: str) -> None:
    """Raise ConfigError for a first word that is neither a verb nor an override."""
    from harness.suggest import did_you_mean

    verbs = [verb for verb in _COMMANDS if verb != "help"]
    raise ConfigError(
        "verb",
        word,
        f"write a verb ({', '.join(verbs)}), group=choice or key=value{did_you_mean(word, verbs)}",
    )


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "run": _run,
    "help": lambda arguments: _run(["--help"]),
    "doctor": _verb("harness.doctor", "run_doctor"),
    "plan": _verb("harness.planner.verbs", "main_plan"),
    "simulate": _verb("harness.planner.verbs", "main_simulate"),
    "export": _verb("harness.planner.verbs", "main_export"),
    "report": _verb("harness.report.command", "main"),
    "compare": _verb("harness.report.compare", "main"),
    "dashboard": _verb("harness.dashboard", "main"),
}


if __name__ == "__main__":
    sys.exit(main())
