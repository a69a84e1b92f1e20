"""The example in the docstring of `runners` runs as it stands there."""

from __future__ import annotations

import textwrap

import pytest

import runners


def test_the_docstring_example_decodes_a_token_from_a_graph(capsys: pytest.CaptureFixture[str]) -> None:
    assert runners.__doc__ is not None
    example = textwrap.dedent(runners.__doc__.split(":\n\n", 1)[1])
    assert len([line for line in example.splitlines() if line.strip()]) <= 15

    exec(compile(example, "runners/__init__.py", "exec"), {})

    assert "mode='graph'" in capsys.readouterr().out
