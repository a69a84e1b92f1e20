"""Which tests of a module will run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


def parameters_of(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Yield the parameters of each test of the fixture's module that was selected."""
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.module is request.module and hasattr(item, "callspec"):
            yield item.callspec.params
