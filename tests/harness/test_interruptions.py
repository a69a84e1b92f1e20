"""What ends a job from outside ends it once, and never before its status is written."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.experiment import Experiment, run_job
from harness.interruptions import Interruptions, JobKilledError, JobTimeoutError
from harness.progress import Progress
from harness.record import JobRecord, Status
from harness.record_reader import read_result
from tests.harness.tiny import tiny_yaml

QUIET = Progress(quiet=True)


def test_a_term_signal_becomes_an_exception_that_names_it() -> None:
    with Interruptions() as interruptions, pytest.raises(JobKilledError) as caught, interruptions.raised():
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.signal_name == "SIGTERM"


def test_the_handlers_of_the_caller_are_restored() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    with Interruptions() as interruptions, interruptions.raised(60.0):
        pass
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_an_interrupt_is_raised_where_the_shell_had_it_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with (
            Interruptions() as interruptions,
            pytest.raises(KeyboardInterrupt, match="Ctrl-C"),
            interruptions.raised(),
        ):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_cut_the_winding_down(number: signal.Signals) -> None:
    wound_down = False
    with Interruptions() as interruptions:
        with pytest.raises(KeyboardInterrupt), interruptions.raised():
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(number)
                wound_down = True
        signal.raise_signal(number)
    assert wound_down


def test_a_thread_runs_without_a_time_limit() -> None:
    entered = []

    def work() -> None:
        with Interruptions() as interruptions, interruptions.raised(0.001):
            entered.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert entered == [True]


def test_the_time_limit_raises_with_the_remedy() -> None:
    with (
        Interruptions() as interruptions,
        pytest.raises(JobTimeoutError, match=r"job\.timeout_s=0\.01.*raise it"),
        interruptions.raised(0.01),
    ):
        signal.pause()


def test_a_time_limit_that_was_swallowed_raises_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.interruptions._AGAIN_S", 0.01)
    monkeypatch.setattr("harness.interruptions._WIND_DOWN_S", 0.0)
    with Interruptions() as interruptions, pytest.raises(JobTimeoutError), interruptions.raised(0.01):
        with contextlib.suppress(JobTimeoutError):  # as a destructor does
            signal.pause()
        signal.pause()


def _signals_when(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: signal.Signals) -> None:
    """Send `number` to this process whenever `owner.name` is called, and then do what it does."""
    original: Callable[..., Any] = getattr(owner, name)

    def send(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(number)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, send)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_interrupt_while_the_job_winds_down_leaves_its_status(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _signals_when(monkeypatch, Experiment, "size_sweep", signal.SIGINT)
    for owner, name in ((JobRecord, "finish_all"), (JobRecord, "close"), (Experiment, "_conclude")):
        _signals_when(monkeypatch, owner, name, number)
    assert run_job(tiny_yaml(), tmp_path, QUIET) is Status.INTERRUPTED
    result = read_result(tmp_path)
    assert result["status"] == "interrupted"
    assert result["error"]["message"] == "interrupted by Ctrl-C (SIGINT)"
    assert not (tmp_path / "parts").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_the_result_is_published_costs_the_publication_only(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _signals_when(monkeypatch, threading.Thread, "start", number)
    job = tiny_yaml({"tracking.mode": "offline", "measure.enabled": False, "workload.enabled": False})
    assert run_job(job, tmp_path, QUIET) is Status.OK
    result = read_result(tmp_path)
    assert result["status"] == "ok"
    assert result["wandb"]["status"] == "failed"
    assert "publish again with `python -m harness.tracking" in result["wandb"]["reason"]
