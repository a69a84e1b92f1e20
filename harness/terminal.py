"""Writes to a terminal or a pipe that may be closed at any time: `| head -1` must not end a job."""

from __future__ import annotations

import os
import sys
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def say(text: str, file: IO[str] | None = None) -> None:
    """Print `text` on stdout (or `file`) at once; once nobody reads it, print nothing."""
    file = file or sys.stdout
    try:
        print(text, file=file, flush=True)
    except BrokenPipeError:
        _write_to_nobody(file)


def open_console(**options: Any) -> Console:
    """Return a rich console, with rich's own options, that falls silent once nobody reads it."""
    from rich.console import Console

    class PatientConsole(Console):
        def on_broken_pipe(self) -> None:
            """Rich would end the program here, with 1."""
            self.quiet = True
            _write_to_nobody(self.file)

    return PatientConsole(**options)


def _write_to_nobody(file: IO[str]) -> None:
    """Let `file` go nowhere. NOTE: what it still holds is written at exit, and would fail again there."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file.fileno())
    os.close(nowhere)
