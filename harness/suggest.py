"""Finds the word that a user probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word nearest to `word`, or None if none is near.

    In a short word, letters that changed places leave little alike: its letters in another order are near too.
    """
    known = list(known)
    swapped = (other for other in known if sorted(other) == sorted(word))
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.6)), None) or next(swapped, None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?`, or nothing."""
    match = closest(word, known)
    return f"; did you mean {match}?" if match else ""
