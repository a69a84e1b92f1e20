"""The report as one HTML file: no part of it is loaded from elsewhere, nothing recorded is read as markup."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from string import Template
from typing import Any

from harness.report.figure import MAX_TABLE_ROWS, Figure, Spec, Table, number, rounded

_BAD, _WARN = "bad", "warn"


@dataclass(frozen=True)
class Banner:
    """A sentence across the page that must not be missed."""

    word: str
    text: str
    is_bad: bool = False


@dataclass(frozen=True)
class Fact:
    """One figure of the heading."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A heading with its facts, figures, and markup that is already safe."""

    name: str
    title: str
    note: str = ""
    facts: Sequence[Fact] = ()
    figures: Sequence[Figure] = ()
    markup: str = ""


@dataclass(frozen=True)
class Page:
    """What a report says; `render` makes it a file."""

    title: str
    subtitle: str
    sections: Sequence[Section]
    banners: Sequence[Banner] = ()
    #: Every chart bears these: figures that no CUDA graph stands behind, replay not proven equal to eager.
    is_emulated: bool = False
    is_unverified: bool = False
    footer: str = ""
    #: What whoever makes the page is told on the terminal too.
    warnings: Sequence[str] = ()
    marks: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        marks = [("EMULATED: no CUDA graph's figures", self.is_emulated), ("UNVERIFIED", self.is_unverified)]
        object.__setattr__(self, "marks", [text for text, applies in marks if applies])


def render(page: Page) -> str:
    """Return the page as HTML."""
    sections = [section for section in page.sections if section.figures or section.facts or section.markup]
    figures = [figure for section in sections for figure in section.figures]
    script, plotly = _asset("page.js"), _plotly()
    return Template(_asset("page.html")).substitute(
        policy=_policy(script, plotly),
        title=html.escape(page.title),
        subtitle=html.escape(page.subtitle),
        style=_asset("page.css"),
        banners="\n".join(map(_banner, page.banners)),
        contents="".join(f'<li><a href="#{s.name}">{html.escape(s.title)}</a></li>' for s in sections),
        main="\n".join(_section(section, page) for section in sections),
        footer=html.escape(page.footer),
        figures=script_json([_spec(figure, page.marks) for figure in figures]),
        plotly=plotly,
        script=script,
    )


def _asset(name: str) -> str:
    return (files("harness.report") / name).read_text(encoding="utf-8")


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _policy(*scripts: str) -> str:
    """Allow these scripts by their hash and nothing else: not even markup that slipped in could run."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def script_json(value: Any) -> str:
    """Return JSON that cannot end the script element it stands in."""
    text = json.dumps(rounded(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _spec(figure: Figure, marks: Sequence[str]) -> Spec:
    spec: Spec = {
        "name": figure.name,
        "traces": list(figure.traces),
        "layout": _layout(figure, marks),
        "choices": [{"label": choice.label, "traces": list(choice.traces)} for choice in figure.choices],
        "log_axis": figure.log_axis,
    }
    return spec | ({"jobs": figure.jobs} if figure.jobs else {})


def _layout(figure: Figure, marks: Sequence[str]) -> Spec:
    mark = {
        "text": " · ".join(marks), "xref": "paper", "yref": "paper", "x": 1, "y": 1, "xanchor": "right",
        "yanchor": "bottom", "showarrow": False, "font": {"color": "var(--mark)", "size": 12},
    }  # fmt: skip
    common: Spec = {
        "height": figure.height,
        "margin": {"l": 56, "r": 24, "t": 34, "b": 48},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "var(--text)", "family": "system-ui, sans-serif", "size": 13},
        "hoverlabel": {
            "bgcolor": "var(--panel)",
            "bordercolor": "var(--line)",
            "font": {"color": "var(--text)"},
        },
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal"},
        "barmode": "stack",
        "bargap": 0.15,
    }
    annotations = [*figure.layout.get("annotations", ()), *([mark] if marks else ())]
    return common | figure.layout | {"annotations": annotations}


def _banner(banner: Banner) -> str:
    kind = _BAD if banner.is_bad else _WARN
    return (
        f'<p class="banner {kind}" role="alert"><strong>{html.escape(banner.word)}</strong> '
        f"{html.escape(banner.text)}</p>"
    )


def _section(section: Section, page: Page) -> str:
    note = f'<p class="note">{html.escape(section.note)}</p>' if section.note else ""
    figures = "\n".join(_figure(figure, page) for figure in section.figures)
    return (
        f'<section id="{section.name}" aria-labelledby="{section.name}-title">'
        f'<h2 id="{section.name}-title">{html.escape(section.title)}</h2>{note}'
        f"{_facts(section.facts)}{figures}{section.markup}</section>"
    )


def _facts(facts: Sequence[Fact]) -> str:
    if not facts:
        return ""
    cells = (
        f"<div><dt>{html.escape(fact.name)}</dt><dd>{html.escape(fact.value)}"
        + (f"<small>{html.escape(fact.note)}</small>" if fact.note else "")
        + "</dd></div>"
        for fact in facts
    )
    return f'<dl class="facts">{"".join(cells)}</dl>'


def _figure(figure: Figure, page: Page) -> str:
    badges = "".join(
        f'<span class="badge {kind}">{word}</span>'
        for word, kind, applies in (
            ("emulated", "", page.is_emulated),
            ("UNVERIFIED", "bad", page.is_unverified),
        )
        if applies
    )
    return (
        f'<figure aria-labelledby="{figure.name}-title">'
        f'<header><h3 id="{figure.name}-title">{html.escape(figure.title)}</h3>{badges}{_controls(figure)}</header>'
        f"<figcaption>{html.escape(figure.caption)}</figcaption>"
        f'<div id="{figure.name}" role="img" aria-label="{html.escape(figure.alt)}" '
        f'style="min-height:{figure.height}px"></div>'
        f"<details><summary>The same as a table</summary>{table_markup(figure.table)}</details></figure>"
    )


def _controls(figure: Figure) -> str:
    controls = ""
    if figure.choices:
        options = "".join(f"<option>{html.escape(choice.label)}</option>" for choice in figure.choices)
        controls += (
            f'<label>{html.escape(figure.menu)} <select id="{figure.name}-menu">{options}</select></label>'
        )
    if figure.log_axis:
        checked = " checked" if figure.is_log else ""
        name = html.escape(figure.log_axis[0])
        controls += f'<label><input type="checkbox" id="{figure.name}-log"{checked}> {name}</label>'
    return f'<div class="controls">{controls}</div>' if controls else ""


def table_markup(table: Table) -> str:
    """Return a data table; text to the left, numbers to the right, a dash for what was not measured."""
    shown = table.rows[:MAX_TABLE_ROWS]
    is_text = [any(isinstance(row[i], str) for row in shown) for i in range(len(table.heads))]
    heads = "".join(
        f'<th scope="col"{_text_class(text)}>{html.escape(head)}</th>'
        for head, text in zip(table.heads, is_text, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{_text_class(t)}>{cell_text(v)}</td>" for v, t in zip(row, is_text, strict=True))
        + "</tr>"
        for row in shown
    )
    rest = len(table.rows) - len(shown)
    note = f"<p>{rest} more rows are in the recorded files.</p>" if rest else ""
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Data table">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>{note}"
    )


def _text_class(is_text: bool) -> str:
    return ' class="text"' if is_text else ""


def cell_text(value: object) -> str:
    """Return a value as escaped text."""
    if value is None or value != value:
        return "–"
    if isinstance(value, float):
        return number(value)
    return html.escape(str(value))


def details_markup(items: Iterable[tuple[str, str]]) -> str:
    """Return folded text blocks by their title."""
    return "".join(
        f'<details><summary>{html.escape(title)}</summary><pre tabindex="0">{html.escape(text)}</pre></details>'
        for title, text in items
    )
