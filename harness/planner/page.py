"""The plan as one self-contained HTML page: the histogram, the lists side by side, the Pareto front."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from harness.planner.tables import (
    HALVES_COLUMNS,
    HALVES_NOTE,
    gain_text,
    half_cells,
    half_lines,
    halves_title,
    verdict_lines,
)

if TYPE_CHECKING:
    from harness.planner.export import EngineFlags
    from harness.planner.plan import Judged, Plan

_MIB = 1024**2
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}pre{background:#f5f5f5;padding:.8em;overflow-x:auto}
.verdict{font-size:1.2em;font-weight:600}.warning{color:#a40}
"""


def plan_page(plan: Plan, flags: Sequence[EngineFlags], source: str, workload: str) -> str:
    """Return the page; it needs no network and no other file."""
    from plotly.offline import get_plotlyjs

    verdict, *lines = verdict_lines(plan)
    body = [
        "<h1>Capture plan</h1>",
        f'<p class="verdict">{html.escape(verdict)}</p>',
        *(f"<p>{html.escape(line)}</p>" for line in [*lines, *half_lines(plan)]),
        f"<p>Costs: {html.escape(source)}. Traffic: {html.escape(workload)}.</p>",
        *(f'<p class="warning">{html.escape(warning)}</p>' for warning in plan.warnings),
        _chart("histogram", *_histogram(plan)),
        _chart("lists", *_lists(plan)),
        _chart("front", *_front(plan)),
        "<h2>Lists on the held-out part</h2>",
        _judged_table(plan),
        f"<h2>{html.escape(halves_title(plan))}</h2>",
        _table(HALVES_COLUMNS, map(half_cells, plan.halves)),
        f"<p>{html.escape(HALVES_NOTE)}</p>",
        "<h2>Flags</h2>",
        *(_flags(engine) for engine in flags),
    ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Capture plan</title>'
        f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script><body>{''.join(body)}</body></html>"
    )


def _chart(name: str, traces: list[dict[str, Any]], layout: dict[str, Any]) -> str:
    # "</" would end the script.
    data, shown = (json.dumps(part).replace("</", "<\\/") for part in (traces, layout))
    return (
        f'<div id="{name}"></div><script>Plotly.newPlot("{name}",{data},{shown},{{responsive:true}})</script>'
    )


def _layout(title: str, x: str, y: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, "xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}} | more


def _histogram(plan: Plan) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    shares = plan.fitted.by_batch_size(max(plan.choice.sizes)) / max(plan.fitted.total, 1.0)
    bars = {
        "type": "bar",
        "x": list(range(len(shares))),
        "y": shares.tolist(),
        "name": "share of decode steps",
    }
    marks = {
        "type": "scatter", "mode": "markers", "x": list(plan.choice.sizes), "y": [0.0] * plan.choice.num_graphs,
        "name": "planned sizes", "marker": {"symbol": "triangle-up", "size": 9},
    }  # fmt: skip
    return [bars, marks], _layout(
        "Batches that the plan was fitted on", "batch size", "share of decode steps"
    )


def _lists(plan: Plan) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rows = _rows(plan)
    traces = [
        {
            "type": "scatter",
            "mode": "markers",
            "x": list(row.sizes),
            "y": [row.name] * len(row.sizes),
            "name": f"{row.name} ({len(row.sizes)})",
        }
        for row in rows
    ]
    return traces, _layout("Capture lists side by side", "capture size", "", height=60 + 36 * len(rows) + 120)


def _front(plan: Plan) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Fitted times lack the host's time between steps, so the front and the judged lists are kept apart."""
    front = {
        "type": "scatter", "mode": "lines+markers", "name": "best list (fitted)",
        "x": [choice.num_graphs for choice in plan.front], "y": [choice.step_ms for choice in plan.front],
        "text": [f"{choice.device_bytes / _MIB:.0f} MiB, {choice.seconds:.1f} s" for choice in plan.front],
    }  # fmt: skip
    rows = [row for row in _rows(plan) if row.step_ms is not None]
    judged = {
        "type": "scatter", "mode": "markers+text", "name": "held out", "x": [len(row.sizes) for row in rows],
        "y": [row.step_ms for row in rows], "text": [row.name for row in rows], "textposition": "top center",
    }  # fmt: skip
    return [front, judged], _layout("Pareto front", "graphs", "mean decode step (ms)", xaxis_type="log")


def _rows(plan: Plan) -> list[Judged]:
    rows = {row.name: row for row in (plan.plan, plan.default, *plan.engines)}
    return list(rows.values())


def _judged_table(plan: Plan) -> str:
    heads = ("list", "graphs", "step ms", "plan's gain [95%]", "MiB", "capture s")
    cells = (
        (
            row.name,
            str(len(row.sizes)),
            "-" if row.step_ms is None else f"{row.step_ms:.3f}",
            gain_text(row.against),
            f"{row.device_bytes / _MIB:,.0f}",
            f"{row.seconds:.1f}",
        )
        for row in _rows(plan)
    )
    return _table(heads, cells)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _flags(engine: EngineFlags) -> str:
    text = engine.flags + (f"\n\n{engine.config}" if engine.config else "")
    checked = f"{engine.engine}, {engine.checked}"
    return f"<h3>{html.escape(checked)}</h3><pre>{html.escape(text)}</pre>"
