"""What several files of the runners' tests start from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runners.model_runner import ModelRunner
from tests.runners.compiled_runner import trace_only
from tests.runners.tiny_runner import tiny_runner


@pytest.fixture
def runner() -> Iterator[ModelRunner]:
    """A tiny runner with graphs of 1, 2, 4 and 8, emulated."""
    with tiny_runner() as made:
        yield made


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run what dynamo traced as it is."""
    trace_only(monkeypatch)
