"""The choices that the design names and that are not built yet. One row each: delete it with the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.errors import NotYetAvailable

if TYPE_CHECKING:
    from harness.schema import Config

#: (field, is the choice made?, what to write instead)
_CONFIG: tuple[tuple[str, Callable[[Config], bool], str], ...] = (
    ("sweep.dry_run", lambda c: c.sweep.dry_run, "add --cfg job to see one point without running it"),
)


def refuse_not_yet(config: Config) -> None:
    """Raise NotYetAvailable for the first choice that belongs to a later version."""
    for field, chosen, instead in _CONFIG:
        if chosen(config):
            section, _, name = field.partition(".")
            raise NotYetAvailable(field, getattr(getattr(config, section), name), instead)
