"""A chart of the report: its Plotly traces, and what makes it readable without seeing it."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

#: Traces, layouts: Plotly's own words, as JSON. A colour is `var(--name)`, which page.js looks up in
#: page.css, for light or dark.
Spec = dict[str, Any]

#: A data table under a chart has at most this many rows; the recorded files have them all.
MAX_TABLE_ROWS = 200
_SIGNIFICANT = 5

MODE_COLOURS = {
    "graph": "var(--graph)",
    "split": "var(--split)",
    "eager": "var(--eager)",
    "compiled": "var(--compiled)",
    "prefill": "var(--prefill)",
}


@dataclass(frozen=True)
class Table:
    """Rows of text and numbers under heads. A None is what was not measured."""

    heads: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True)
class Choice:
    """One setting of a menu: its name, and the traces shown, by index."""

    label: str
    traces: Sequence[int]


@dataclass(frozen=True)
class Figure:
    """One chart with its title, caption, alternative text and the same figures as a table."""

    name: str
    title: str
    caption: str
    alt: str
    traces: Sequence[Spec]
    layout: Spec
    table: Table
    #: Axes whose scale a checkbox makes logarithmic: (label, axis name), initially `is_log`.
    log_axis: tuple[str, str] | None = None
    is_log: bool = False
    #: What a menu chooses from; all traces are shown without one.
    menu: str = ""
    choices: Sequence[Choice] = ()
    #: Job → x and y of its point or line, for the table of jobs to point at; drawn by the last trace.
    jobs: dict[str, tuple[list[Any], list[Any]]] = field(default_factory=dict)
    height: int = 400


def axis(title: str, **more: Any) -> Spec:
    """Return an axis with quiet grid lines."""
    return {
        "title": {"text": title, "standoff": 8},
        "gridcolor": "var(--grid)",
        "linecolor": "var(--line)",
        "zeroline": False,
        "automargin": True,
    } | more


def line(name: str, colour: str, x: Sequence[Any], y: Sequence[Any], **more: Any) -> Spec:
    """Return a line with a marker at each point."""
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": list(x),
        "y": list(y),
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour, "size": 6},
    } | more


def bars(name: str, colour: str, x: Sequence[Any], y: Sequence[Any], **more: Any) -> Spec:
    """Return bars without outline."""
    return {
        "type": "bar",
        "name": name,
        "x": list(x),
        "y": list(y),
        "marker": {"color": colour, "line": {"width": 0}},
    } | more


def chosen_jobs(**more: Any) -> Spec:
    """Return the empty trace in which page.js draws the jobs chosen in the table; the last of a figure."""
    return {
        "type": "scatter",
        "name": "chosen in the table",
        "x": [],
        "y": [],
        "hoverinfo": "skip",
        "connectgaps": False,
    } | more


def number(value: float | None, digits: int = 4) -> str:
    """Return a figure with this many significant digits and no exponent; a dash for None."""
    if value is None or not math.isfinite(value):
        return "–"
    size = math.floor(math.log10(abs(value))) + 1 if value else 1
    return (
        f"{value:,.0f}"
        if size >= digits
        else f"{value:.{digits - size}f}"
        if size > -4
        else f"{value:.{digits}g}"
    )


def label(text: object) -> str:
    """Return text for a trace, tick or hover label: Plotly reads tags and entities in those."""
    return html.escape(str(text), quote=False)


def rounded(value: Any) -> Any:
    """Return a spec with floats cut to five digits, which the eye cannot tell; NaN becomes None."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return float(f"{value:.{_SIGNIFICANT}g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value
