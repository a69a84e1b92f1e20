"""Progress is a bar on a terminal and plain lines elsewhere, and never draws by itself."""

from __future__ import annotations

import io
import re
import threading

import pytest
from rich.console import Console

from harness import progress as progress_module
from harness.progress import CAPTURE, Progress


def shown(*, terminal: bool, quiet: bool = False) -> tuple[Progress, io.StringIO]:
    text = io.StringIO()
    return Progress(Console(file=text, force_terminal=terminal, width=80, quiet=quiet), quiet=quiet), text


def without_codes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_pipe_gets_a_line_at_the_start_and_one_at_the_end() -> None:
    progress, text = shown(terminal=False)
    with progress.task(CAPTURE, total=7) as task:
        for _ in range(7):
            task.advance()
    first, last = text.getvalue().splitlines()
    assert first == "capture: 0/7"
    assert re.fullmatch(r"capture: 7/7 done in \d+\.\d s", last)
    assert "\x1b" not in text.getvalue()


def test_a_pipe_gets_a_line_on_the_way_when_a_task_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "_MIN_LINE_S", 0.0)
    progress, text = shown(terminal=False)
    with progress.task(CAPTURE, total=2) as task:
        task.advance(detail="capture size 8")
        task.advance(detail="capture size 4")
    assert text.getvalue().splitlines()[1:3] == ["capture: 1/2 capture size 8", "capture: 2/2 capture size 4"]


def test_a_terminal_gets_a_bar_that_ends_full() -> None:
    progress, text = shown(terminal=True)
    with progress.task(CAPTURE, total=3) as task:
        task.advance(3)
    assert "capture" in without_codes(text.getvalue()) and "3/3" in without_codes(text.getvalue())


def test_no_thread_draws_while_a_step_is_timed() -> None:
    progress, _ = shown(terminal=True)
    before = threading.active_count()
    with progress.task(CAPTURE, total=3):
        assert threading.active_count() == before


def test_draws_are_far_apart_however_often_a_task_advances() -> None:
    progress, text = shown(terminal=False)
    with progress.task(CAPTURE, total=10_000) as task:
        for _ in range(10_000):
            task.advance()
    assert len(text.getvalue().splitlines()) < 10


def test_a_task_whose_total_is_not_known_yet_takes_it_later() -> None:
    progress, text = shown(terminal=False)
    with progress.task(CAPTURE) as task:
        task.set_total(2)
        task.advance(2)
    assert text.getvalue().splitlines()[0] == "capture: ..."
    assert "capture: 2/2 done" in text.getvalue()


def test_an_error_ends_the_task_as_stopped_and_passes_on() -> None:
    for terminal in (False, True):
        progress, text = shown(terminal=terminal)
        with pytest.raises(RuntimeError, match="boom"), progress.task(CAPTURE, total=4) as task:
            task.advance()
            raise RuntimeError("boom")
        assert "1/4" in without_codes(text.getvalue())
    assert progress.console.is_terminal


def test_a_note_stands_above_its_lines() -> None:
    progress, text = shown(terminal=False)
    progress.note("workload", ["requests: 20", "prompt tokens: [bold] 8 to 64"])
    assert text.getvalue() == "workload\n  requests: 20\n  prompt tokens: [bold] 8 to 64\n"


def test_a_quiet_progress_shows_nothing_and_counts_all_the_same() -> None:
    progress, text = shown(terminal=True, quiet=True)
    progress.note("workload")
    with progress.task(CAPTURE, total=2) as task:
        task.advance(2)
    assert (task.done, text.getvalue()) == (2, "")
