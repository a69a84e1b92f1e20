"""The capture flag and the quiet collector restore everything, whatever happens inside."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runners.cuda_graph_runner import freeze_gc, is_capture_mode, model_capture_mode

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def thawed_and_enabled() -> Iterator[None]:
    gc.unfreeze()
    gc.enable()
    yield
    gc.unfreeze()
    gc.enable()


def test_capture_mode_is_on_inside_the_block_only() -> None:
    assert not is_capture_mode()
    with model_capture_mode():
        assert is_capture_mode()
    assert not is_capture_mode()


def test_capture_mode_restores_the_previous_value_when_nested() -> None:
    with model_capture_mode():
        with model_capture_mode():
            pass
        assert is_capture_mode()


def test_capture_mode_is_off_again_after_an_exception() -> None:
    with pytest.raises(KeyError), model_capture_mode():
        raise KeyError
    assert not is_capture_mode()


def test_freeze_gc_disables_and_freezes_inside_and_restores_after() -> None:
    with freeze_gc():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_objects_that_the_interpreter_froze_at_its_start_are_not_the_caller_s() -> None:
    program = (
        "import gc\n"
        "from runners.capture_mode import freeze_gc\n"
        "with freeze_gc():\n"
        "    print(gc.get_freeze_count() > 3000)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )

    assert done.stdout == "True\n"


def test_freeze_gc_restores_after_an_exception() -> None:
    with pytest.raises(KeyError), freeze_gc():
        raise KeyError
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_freeze_gc_leaves_a_collector_disabled_that_was_disabled() -> None:
    gc.disable()
    with freeze_gc():
        pass
    assert not gc.isenabled()


def test_freeze_gc_never_thaws_what_the_caller_froze() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with freeze_gc():
        assert gc.get_freeze_count() <= frozen
    assert gc.get_freeze_count() > 0


def test_nested_freeze_gc_keeps_the_outer_block_quiet() -> None:
    with freeze_gc():
        frozen = gc.get_freeze_count()
        with freeze_gc():
            assert not gc.isenabled()
        assert not gc.isenabled()
        assert gc.get_freeze_count() >= frozen - 1
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_nothing_is_collected_when_an_inner_block_ends_inside_a_capture() -> None:
    collections: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    with freeze_gc():
        gc.callbacks.append(note)
        try:
            with freeze_gc():
                pass
            assert collections == []
        finally:
            gc.callbacks.remove(note)


def test_freeze_gc_collects_before_and_after() -> None:
    collections: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    gc.callbacks.append(note)
    try:
        with freeze_gc():
            assert collections == ["start", "stop"]
        assert collections == ["start", "stop"] * 2
    finally:
        gc.callbacks.remove(note)
