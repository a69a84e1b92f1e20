"""Finds the word that a user probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word nearest to `word`, or None if none is near."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?`, or nothing."""
    match = closest(word, known)
    return f"; did you mean {match}?" if match else ""
