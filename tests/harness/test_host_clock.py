"""A duration of device work exists only once the work was waited for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import harness
from harness.host_clock import Arrival, Instant
from harness.time_sheet import TimeSheet

#: Modules with torch or runners in reach that may read a clock themselves, and what they time: never a step.
MAY_READ_A_CLOCK = {
    "host_clock.py": "the one place where a duration of device work is made",
    "size_sweep.py": "the time limit of the warm-up",
    "telemetry.py": "what its own looks cost",
    "experiment.py": "wall time of the phases",
    "scheduler_loop.py": "CPU time from one resolved step to the next",
}
_CLOCKS = {"perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns", "process_time"}


class Work:
    """Work on a device of its own; `is_done` only once it was waited for."""

    is_done = False

    def read(self) -> str:
        self.is_done = True
        return "tokens"


def test_an_arrival_waits_and_holds_what_came() -> None:
    work = Work()
    assert Arrival(work).value == "tokens"
    assert work.is_done


def test_the_wait_belongs_to_the_duration() -> None:
    class Slow(Work):
        def read(self) -> str:
            spun = Instant()
            while Arrival(Work()).ms_since(spun) < 3.0:
                pass
            return "tokens"

    start = Instant()
    assert Arrival(Slow()).ms_since(start) >= 3.0


def test_instants_alone_have_no_difference() -> None:
    """A launch's end is an Instant; only what waited can say how long it took."""
    assert not hasattr(Instant(), "ms_since")
    with pytest.raises(TypeError):
        Instant() - Instant()  # type: ignore[operator]
    with pytest.raises(AttributeError):
        Arrival(None)  # type: ignore[arg-type]


def test_the_later_of_two_instants() -> None:
    first, second = Instant(), Instant()
    assert first.or_later(second) is second
    assert second.or_later(first) is second
    assert first.or_later(None) is first


def test_no_other_module_near_a_device_reads_a_clock_of_its_own() -> None:
    trees = {path.name: ast.parse(path.read_text()) for path in Path(harness.__file__).parent.rglob("*.py")}
    reading = {name for name, tree in trees.items() if _reads_a_clock(tree) and _sees_a_device(tree)}
    assert "host_clock.py" in reading
    assert reading - MAY_READ_A_CLOCK.keys() == set(), "time device work with harness.host_clock"


def _reads_a_clock(tree: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "time"
        and node.attr in _CLOCKS
        for node in ast.walk(tree)
    )


def _sees_a_device(tree: ast.AST) -> bool:
    """Whether torch or the runners are imported, other than for types alone."""
    modules = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return any(module.split(".")[0] in ("torch", "runners") for module in modules)


def test_a_time_sheet_adds_up_to_the_wall_time() -> None:
    now_s = 0.0
    sheet = TimeSheet(lambda: now_s)
    for name, seconds in (("samples", 3.0), ("telemetry", 0.5), ("samples", 1.0)):
        with sheet.book(name):
            now_s += seconds
    now_s += 0.25
    assert sheet.seconds() == {"wall_s": 4.75, "samples_s": 4.0, "telemetry_s": 0.5, "other_s": 0.25}
