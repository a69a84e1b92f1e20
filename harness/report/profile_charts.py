"""The chart of the profile: the kernels of a step, by size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.profile_view import main_graph, shape_line, short_name
from harness.report.figure import Choice, Figure, Spec, Table, axis, bars, label

Row = Mapping[str, Any]
_NUM_BARS = 12


def profile_figure(rows: Sequence[Row], shapes: Sequence[Row]) -> Figure:
    """Return the longest kernels (without CUDA, operators) of each profiled size; `rows` of profile.csv."""
    points = list(dict.fromkeys((row["batch_size"], row["mode"]) for row in rows))
    shape_of = {(shape["batch_size"], shape["mode"]): shape for shape in shapes}
    main = main_graph(shapes)
    if main is not None:  # the menu begins with the largest graph
        points.sort(key=lambda point: point != (main["batch_size"], main["mode"]))
    by_point = {point: [row for row in rows if (row["batch_size"], row["mode"]) == point] for point in points}
    first = by_point[points[0]]
    kind = first[0]["kind"] if first[0]["kind"] == "operator" else "kernel"
    traces = [
        _bars(kept[:_NUM_BARS]) | {"visible": index == 0} for index, kept in enumerate(by_point.values())
    ]
    lines = [shape_line(shape) for point in points if (shape := shape_of.get(point)) and shape["num_kernels"]]
    return Figure(
        name="profile",
        title=f"The {kind}s of a step",
        caption="By torch's profiler in a phase of its own, after all that is timed: it shows which parts a step has, "
        f"not how long a step takes. {_what(kind)} " + " ".join(f"{line}." for line in lines[:2]),
        alt=f"Bars of time by {kind}. At batch {points[0][0]} ({points[0][1]}) most goes to "
        + ", ".join(f"{short_name(row['name'], 40)} with {row['share']:.0%}" for row in first[:3])
        + ".",
        traces=traces,
        layout={
            "xaxis": axis("µs a step"),
            "yaxis": axis("", type="category", autorange="reversed"),
            "hovermode": "closest",
        },
        table=_table(rows),
        menu="step",
        choices=[Choice(f"batch {size}, {mode}", (index,)) for index, (size, mode) in enumerate(points)],
        height=460,
    )


def _what(kind: str) -> str:
    if kind == "operator":
        return "Without CUDA: operators of the emulated graph by their own time on the CPU."
    return "Calls and time are those of one step; gaps are what no kernel of the graph ran in."


def _bars(rows: Sequence[Row]) -> Spec:
    names = [f"{index + 1}. {label(short_name(row['name'], 34))}" for index, row in enumerate(rows)]
    trace = bars("time", "var(--device)", [row["time_us"] for row in rows], names)
    trace["orientation"] = "h"
    trace["showlegend"] = False
    trace["text"] = [
        f"{label(short_name(row['name'], 90))}<br>{row['num_calls']:.0f} calls, {row['time_us']:.4g} µs, {row['share']:.1%}"
        for row in rows
    ]
    trace["textposition"] = "none"
    trace["hovertemplate"] = "%{text}<extra></extra>"
    return trace


def _table(rows: Sequence[Row]) -> Table:
    heads = ("batch size", "mode", "kind", "in the graph", "calls", "µs", "%", "name")
    said = {None: None, True: "yes", False: "no"}
    return Table(
        heads,
        [
            [row["batch_size"], row["mode"], row["kind"], said[row["in_graph"]], row["num_calls"], row["time_us"],
             100 * row["share"], short_name(row["name"], 120)]
            for row in rows
        ],
    )  # fmt: skip
