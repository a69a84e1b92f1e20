"""Reads a report back: what stands in it, and what it would load."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from harness.report.command import main

#: Attributes that make a browser fetch something.
_FETCHED = {"src", "href", "data", "poster", "srcset", "action", "formaction", "background"}


def report(folder: Path) -> str:
    """Make the report of a folder and return its HTML."""
    assert main([str(folder)]) == 0
    return (folder / "report.html").read_text()


def figures(page: str) -> list[dict[str, Any]]:
    """Return the figures that the page draws."""
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.S)
    assert found
    result: list[dict[str, Any]] = json.loads(found.group(1))
    return result


def figure(page: str, name: str) -> dict[str, Any]:
    return next(one for one in figures(page) if one["name"] == name)


def trace(page: str, name: str, trace_name: str) -> dict[str, Any]:
    """Return the last trace of a name: of a line that is drawn apart from its points, the points."""
    found: dict[str, Any] = [one for one in figure(page, name)["traces"] if one["name"] == trace_name][-1]
    return found


class Markup(HTMLParser):
    """The page's elements, its text outside scripts, and the addresses that it names."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.addresses: list[str] = []
        self.text = ""
        self._hidden = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._hidden = tag in ("script", "style")
        self.addresses += [value or "" for name, value in attrs if name in _FETCHED]

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)
