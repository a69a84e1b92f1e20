"""The chart of all jobs of a sweep as parallel coordinates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.report.figure import Figure, Spec, Table, chosen_jobs, label
from harness.report.ranking import comparable_jobs, objectives
from harness.report.sweep_rows import METRICS, Sweep, SweepJob

#: Colours of the lines, from the best fifth of the jobs to the worst.
_FIFTHS = (
    ("best fifth", "var(--q1)"),
    ("second", "var(--q2)"),
    ("third", "var(--q3)"),
    ("fourth", "var(--q4)"),
    ("worst fifth", "var(--q5)"),
)
_MAX_LEVELS = 24
#: A plot with more axes than this cannot be read.
_MAX_AXES = 11


def parallel_figure(sweep: Sweep) -> Figure | None:
    """Return parallel coordinates: an axis a varied setting and a figure, a line a job."""
    jobs, metrics = comparable_jobs(sweep), objectives(sweep)
    if not metrics or len(jobs) < 2:
        return None
    objective = metrics[0]
    axes = _parallel_axes(jobs)
    ranked = sorted(
        (job for job in jobs if job.values.get(objective.key) is not None),
        key=lambda job: job.values[objective.key] or 0,
    )
    places = {job.name: _path(job, axes) for job in jobs}
    traces = []
    for index, (name, colour) in reversed(list(enumerate(_FIFTHS))):
        members = [job for rank, job in enumerate(ranked) if rank * len(_FIFTHS) // len(ranked) == index]
        if members:
            traces.append(_lines(name, colour, members, places, axes))
    line = {"color": "var(--chosen)", "width": 3.5}
    traces.append(chosen_jobs(mode="lines+markers", line=line, marker={"size": 6}))
    title = sweep.title_of(objective)
    return Figure(
        name="parallel",
        title="All jobs, setting by setting",
        caption=f"A line a job, coloured by {title}; on every axis the better end of a figure is up. Filter the table "
        "below, or go to a row in it, to draw those jobs in colour.",
        alt=f"Parallel coordinates of {len(jobs)} jobs over " + ", ".join(one.title for one in axes) + ".",
        traces=traces,
        layout={
            "xaxis": {
                "tickvals": list(range(len(axes))), "ticktext": [_wrapped(one.title) for one in axes], "side": "top",
                "showgrid": True, "gridcolor": "var(--line)", "zeroline": False, "fixedrange": True,
                "range": [-0.35, len(axes) - 0.65], "automargin": True, "tickfont": {"size": 12},
            },
            "yaxis": {"visible": False, "range": [-0.06, 1.06], "fixedrange": True},
            "annotations": [mark for place, one in enumerate(axes) for mark in _axis_marks(place, one)],
            "legend": {"orientation": "h", "x": 0, "y": -0.02, "yanchor": "top", "traceorder": "reversed"},
            "hovermode": "closest",
            "margin": {"l": 24, "r": 24, "t": 84, "b": 48},
        },
        table=Table(
            ("job", *(one.title for one in axes)), [[job.name, *(one.shown(job) for one in axes)] for job in ranked]
        ),
        jobs=places,
        height=500,
    )  # fmt: skip


class _Axis:
    """One vertical axis: levels of a setting, or the range of a figure."""

    def __init__(self, title: str, values: Mapping[str, Any], is_high_good: bool | None) -> None:
        self.title = title
        self._values = values
        self.is_figure = is_high_good is not None
        present = [value for value in values.values() if value is not None]
        if self.is_figure:
            low, high = min(present), max(present)
            self.bottom, self.top = (low, high) if is_high_good else (high, low)
        else:
            self.levels = sorted(set(present), key=_natural)

    def place(self, job: SweepJob) -> float | None:
        """Where the job crosses the axis, 0 to 1."""
        value = self._values.get(job.name)
        if value is None:
            return None
        if not self.is_figure:
            return float(self.levels.index(value)) / max(1, len(self.levels) - 1)
        return float((value - self.bottom) / (self.top - self.bottom)) if self.top != self.bottom else 0.5

    def shown(self, job: SweepJob) -> object:
        return self._values.get(job.name)


def _natural(text: str) -> tuple[int, float, str]:
    try:
        return 0, float(text), text
    except ValueError:
        return 1, 0.0, text


def _parallel_axes(jobs: Sequence[SweepJob]) -> list[_Axis]:
    keys = dict.fromkeys(key for job in jobs for key in job.varied)
    axes = [_Axis(key, {job.name: job.varied.get(key) for job in jobs}, None) for key in keys]
    axes = [one for one in axes if 1 < len(one.levels) <= _MAX_LEVELS]
    for metric in METRICS:
        values = {job.name: job.values.get(metric.key) for job in jobs}
        present = {value for value in values.values() if value is not None}
        if len(present) > 1:
            axes.append(_Axis(f"{metric.title}, {metric.unit}", values, metric.is_high_good))
    return axes[:_MAX_AXES]


def _path(job: SweepJob, axes: Sequence[_Axis]) -> tuple[list[Any], list[Any]]:
    return list(range(len(axes))), [one.place(job) for one in axes]


def _lines(
    name: str,
    colour: str,
    jobs: Sequence[SweepJob],
    places: Mapping[str, tuple[list[Any], list[Any]]],
    axes: Sequence[_Axis],
) -> Spec:
    """One trace for all lines of a colour, with gaps between: 200 traces would draw slowly."""
    x: list[Any] = []
    y: list[Any] = []
    text: list[str | None] = []
    for job in jobs:
        x += [*places[job.name][0], None]
        y += [*places[job.name][1], None]
        text += [
            *(f"{label(job.title)}<br>{label(one.title)}: {_value_text(one.shown(job))}" for one in axes),
            None,
        ]
    return {
        "type": "scatter", "mode": "lines", "name": name, "x": x, "y": y, "text": text, "opacity": 0.75,
        "line": {"color": colour, "width": 1.3}, "hovertemplate": "%{text}<extra></extra>",
    }  # fmt: skip


def _value_text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else label("–" if value is None else value)


def _axis_marks(place: int, one: _Axis) -> list[Spec]:
    if one.is_figure:
        marks = [(0.0, f"{one.bottom:.4g}"), (1.0, f"{one.top:.4g}")]
    else:
        count = max(1, len(one.levels) - 1)
        marks = [(index / count, level) for index, level in enumerate(one.levels)]
    return [
        {
            "x": place, "y": y, "text": label(_short(text)), "showarrow": False, "xanchor": "left", "xshift": 4,
            "font": {"size": 11, "color": "var(--soft)"}, "bgcolor": "var(--panel)", "borderpad": 1, "opacity": 0.9,
        }
        for y, text in marks
    ]  # fmt: skip


def _short(text: str) -> str:
    return text if len(text) <= 18 else f"{text[:17]}…"


def _wrapped(title: str) -> str:
    """Break a title after its first word past ten letters, so that axes need not lie far apart."""
    lines = [""]
    for word in title.replace(".", ". ").split(" "):
        if lines[-1] and len(lines[-1]) + len(word) > 12:
            lines.append("")
        lines[-1] += ("" if not lines[-1] or lines[-1].endswith(".") else " ") + word
    return "<br>".join(label(line) for line in lines)
