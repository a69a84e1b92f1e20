"""--help groups every choice under what it decides, and shows worked examples that compose."""

from __future__ import annotations

import shlex

import pytest

from harness.__main__ import main
from harness.compose import compose
from harness.help import help_text
from tests.harness.test_conf import CHOICES


def examples() -> list[list[str]]:
    lines = [line.strip() for line in help_text().partition("Examples")[2].splitlines()]
    commands = [line for line in lines if line.startswith("python -m harness")]
    return [shlex.split(command)[3:] for command in commands]


def test_help_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert main(["run", "-h"]) == 0
    assert capsys.readouterr().out == help_text() * 2


def test_help_is_also_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    assert capsys.readouterr().out == help_text()


def test_help_lists_every_choice_under_its_group() -> None:
    text = help_text()
    for group, choice in CHOICES:
        section = text.partition(f"  {group}=")[2].partition("\n  " + "=")[0]
        assert f"\n    {choice} " in section


def test_help_shows_three_worked_examples_that_compose() -> None:
    assert len(examples()) == 3
    for arguments in examples():
        single = [text.split(",")[0] if "-m" in arguments else text for text in arguments if text != "-m"]
        compose(single)


def test_help_names_every_verb() -> None:
    lines = help_text().splitlines()
    for verb in ("run", "doctor", "plan", "simulate", "export", "report", "compare", "dashboard"):
        assert any(line.startswith(f"  {verb} ") and "not yet" not in line for line in lines)


def test_help_names_the_exit_codes() -> None:
    assert "0 ok, 1 a job failed, 2 a configuration that cannot run, 130 interrupted" in help_text()
