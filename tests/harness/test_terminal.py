"""A reader that goes away, as `head -1` does, ends no job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from harness.progress import Progress
from harness.summary import print_summary
from harness.terminal import open_console, say
from tests.harness.job_folder import write_job


def closed_pipe() -> IO[str]:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def test_words_to_nobody_are_lost_without_an_error() -> None:
    with closed_pipe() as pipe:
        say("one", pipe)
        say("two", pipe)


def test_progress_goes_on_without_a_reader() -> None:
    with closed_pipe() as pipe, Progress(open_console(file=pipe)).task("capture", total=2) as task:
        task.advance()
        task.advance()


def test_the_summary_ends_without_a_reader(tmp_path: Path) -> None:
    write_job(tmp_path)
    with closed_pipe() as pipe:
        print_summary(tmp_path, open_console(file=pipe))
