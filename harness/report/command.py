"""The verb report: one HTML page of a job or a sweep."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from harness.durable import write_output
from harness.errors import ConfigError
from harness.record import REPORT_FILE, RESULT_FILE, RecordError
from harness.record_reader import job_folders
from harness.report.job_page import job_page
from harness.report.page import Page, render
from harness.report.sweep_page import sweep_page
from harness.terminal import say


def main(argv: Sequence[str]) -> int:
    """Write the page, print its path and return the exit code. Raises ConfigError for another folder."""
    options = _parser().parse_args(argv)
    folder = Path(options.path)
    output = Path(options.output) if options.output else folder / REPORT_FILE
    for job_dir in job_folders(folder) if options.jobs else ():
        with suppress(RecordError):  # the sweep's page says so
            _write(page_of(job_dir), job_dir / REPORT_FILE)
    write_report(folder, output)
    print(output)
    return 0


def write_report(folder: Path, output: Path) -> None:
    """Write the page of the job or sweep in `folder`, whole or not at all; of a sweep, say which jobs it lacks."""
    try:
        page = page_of(folder)
    except RecordError as error:
        raise ConfigError("PATH", folder, str(error)) from error
    for warning in page.warnings:
        say(f"warning: {warning}", sys.stderr)
    _write(page, output)


def _write(page: Page, output: Path) -> None:
    write_output("--output", output, render(page))


def page_of(folder: Path) -> Page:
    """Return the page of a job's folder, or of a sweep's: one that holds jobs."""
    if (folder / RESULT_FILE).exists():
        return job_page(folder)
    if folder.is_dir() and job_folders(folder):
        return sweep_page(folder)
    raise ConfigError(
        "PATH", folder, f"holds neither a {RESULT_FILE} nor jobs; give the folder of a job or a sweep"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness report",
        description="Make one self-contained HTML page of a job or a sweep from its recorded files.",
    )
    parser.add_argument("path", metavar="PATH", help="folder of a job or of a sweep")
    parser.add_argument("--output", metavar="FILE", help=f"where to write it (default PATH/{REPORT_FILE})")
    parser.add_argument(
        "--jobs", action="store_true", help="of a sweep, make each job's page too, linked from it"
    )
    return parser
