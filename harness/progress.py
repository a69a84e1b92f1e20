"""Shows how far a job is: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from harness.terminal import open_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

#: Names of the tasks that a job shows, in order.
LOAD, CAPTURE, PARITY, SIZE_SWEEP, WORKLOAD, PROFILE = (
    "load model",
    "capture",
    "parity",
    "size sweep",
    "workload replay",
    "profile",
)

_MIN_REFRESH_S = 0.1
_MIN_LINE_S = 5.0


class Progress:
    """Opens the tasks of a job, one after the other, on stderr (stdout is for results).

    NOTE: nothing is drawn between two calls of `advance`. A refreshing thread would take the
    interpreter from the steps that are being timed.
    """

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self._console = console
        self.quiet = quiet

    @property
    def console(self) -> Console:
        """Where the progress is shown."""
        if self._console is None:
            self._console = open_console(stderr=True, quiet=self.quiet, highlight=False)
        return self._console

    def note(self, title: str, lines: Iterable[str] = ()) -> None:
        """Print a title, and lines below it, between the tasks."""
        for text in (title, *(f"  {line}" for line in lines)):
            self.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def task(self, name: str, total: int | None = None) -> Iterator[Task]:
        """Show `name` until the block ends; `total` is the number of `advance` calls, None if unknown."""
        task = self._open(name, total)
        try:
            yield task
        except BaseException:
            task.close("stopped")
            raise
        task.close("done")

    def _open(self, name: str, total: int | None) -> Task:
        if self.quiet:
            return Task(name, total)
        if self.console.is_terminal:
            return BarTask(name, total, self.console)
        return LineTask(name, total, self.console)


class Task:
    """A task that shows nothing; the others derive from it."""

    def __init__(self, name: str, total: int | None) -> None:
        self.name = name
        self.total = total
        self.done = 0
        self.detail = ""
        self._start_s = time.perf_counter()
        self._shown_s = self._start_s

    def advance(self, count: int = 1, detail: str = "") -> None:
        """Note that `count` more are done; `detail` says what was (`batch 12`). Draws now and then."""
        self.done += count
        self.detail = detail
        now_s = time.perf_counter()
        if now_s - self._shown_s >= self._interval_s():
            self._shown_s = now_s
            self._show()

    def set_total(self, total: int) -> None:
        """Say how many there are, once known."""
        self.total = total

    def close(self, ending: str) -> None:
        """Show the end: `done` or `stopped`."""

    def _interval_s(self) -> float:
        return _MIN_REFRESH_S

    def _show(self) -> None:
        pass

    def _count(self) -> str:
        return f"{self.done}" if self.total is None else f"{self.done}/{self.total}"


class BarTask(Task):
    """A bar, on a terminal."""

    def __init__(self, name: str, total: int | None, console: Console) -> None:
        super().__init__(name, total)
        self._bars = _bars(console)
        self._id: TaskID = self._bars.add_task(name, total=total, detail="")
        self._bars.start()

    def close(self, ending: str) -> None:
        if ending == "done":
            self.detail = ""
        self._show()
        self._bars.stop()

    def _show(self) -> None:
        self._bars.update(self._id, completed=self.done, total=self.total, detail=self.detail)
        self._bars.refresh()


class LineTask(Task):
    """A line at the start, some on the way, one at the end: for logs and pipes."""

    def __init__(self, name: str, total: int | None, console: Console) -> None:
        super().__init__(name, total)
        self._console = console
        self._print("..." if total is None else f"0/{total}")

    def close(self, ending: str) -> None:
        seconds = time.perf_counter() - self._start_s
        count = "" if self.total is None and not self.done else f"{self._count()} "
        self._print(f"{count}{ending} in {seconds:.1f} s")

    def _interval_s(self) -> float:
        return _MIN_LINE_S

    def _show(self) -> None:
        self._print(f"{self._count()} {self.detail}".rstrip())

    def _print(self, text: str) -> None:
        self._console.print(f"{self.name}: {text}", markup=False, soft_wrap=True)


def _bars(console: Console) -> Bars:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description:>15}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}", markup=False),
        console=console,
        auto_refresh=False,
    )
