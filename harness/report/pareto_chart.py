"""The chart of step time against graph memory, with the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.report.figure import Choice, Figure, Spec, Table, axis, chosen_jobs, label
from harness.report.ranking import comparable_jobs, objectives, pareto_front
from harness.report.sweep_rows import GRAPH_MEMORY, STEP_AT_BATCH, Metric, Sweep, SweepJob


def pareto_figure(sweep: Sweep) -> Figure | None:
    """Return step time against graph memory with the front as a line; None if no job has both."""
    jobs, metrics = comparable_jobs(sweep), objectives(sweep)
    metrics = [metric for metric in metrics if pareto_front(jobs, metric)]
    if not metrics:
        return None
    traces: list[Spec] = []
    choices: list[Choice] = []
    places: dict[str, tuple[list[Any], list[Any]]] = {}
    for index, metric in enumerate(metrics):
        first = len(traces)
        traces += _pareto_traces(sweep, jobs, metric)
        choices.append(Choice(sweep.title_of(metric), range(first, len(traces))))
        places |= {f"{index}/{job.name}": place for job in sweep.jobs if (place := _place(job, metric))}
    marker = {"color": "var(--chosen)", "size": 12, "symbol": "circle-open", "line": {"width": 3}}
    traces.append(chosen_jobs(mode="markers", marker=marker))
    front = pareto_front(jobs, metrics[0])
    return Figure(
        name="pareto",
        title="Step time against graph memory",
        caption="Each point a job; lower left is better. No job beats one on the line in both. Bars: 95% interval "
        "of the median within the run, where samples were kept. Hollow points (not verified, emulated beside real "
        "ones, or not ended ok) stay out of the line.",
        alt=f"Scatter plot of {len(jobs)} jobs. On the front: "
        + "; ".join(job.title for job in front[:12])
        + ".",
        traces=traces,
        layout={
            "xaxis": axis("graph memory, MiB", rangemode="tozero"),
            "yaxis": axis("ms"),
            "hovermode": "closest",
        },
        table=_front_table(front, metrics),
        log_axis=("logarithmic memory axis", "xaxis"),
        menu="step time",
        choices=choices,
        jobs=places,
        height=460,
    )


def _place(job: SweepJob, metric: Metric) -> tuple[list[Any], list[Any]] | None:
    memory, value = job.values.get(GRAPH_MEMORY.key), job.values.get(metric.key)
    return None if memory is None or value is None else ([memory], [value])


def _pareto_traces(sweep: Sweep, jobs: Sequence[SweepJob], metric: Metric) -> list[Spec]:
    front = pareto_front(jobs, metric)
    rest = [job for job in sweep.jobs if job not in front and _place(job, metric)]
    groups = (
        ("other jobs", [job for job in rest if job in jobs], "markers", "var(--soft)", "circle", 7),
        (
            "not comparable",
            [job for job in rest if job not in jobs],
            "markers",
            "var(--soft)",
            "circle-open",
            7,
        ),
        ("on the front", front, "lines+markers", "var(--graph)", "circle", 9),
    )
    return [
        {
            "type": "scatter",
            "name": name,
            "mode": mode,
            "x": [job.values[GRAPH_MEMORY.key] for job in members],
            "y": [job.values[metric.key] for job in members],
            "line": {"color": colour, "width": 1.5, "shape": "hv"},
            "marker": {"color": colour, "symbol": symbol, "size": size},
            "text": [label(job.title) for job in members],
            "hovertemplate": "%{text}<br>%{y:.4g} ms, %{x:.4g} MiB<extra></extra>",
        }
        | _error_bars(members, metric, colour)
        for name, members, mode, colour, symbol, size in groups
        if members
    ]


def _error_bars(jobs: Sequence[SweepJob], metric: Metric, colour: str) -> Spec:
    if metric is not STEP_AT_BATCH:
        return {}
    errors = [(job.values[metric.key] or 0.0) * (job.step_error or 0.0) for job in jobs]
    return {"error_y": {"type": "data", "array": errors, "thickness": 1, "width": 2, "color": colour}}


def _front_table(front: Sequence[SweepJob], metrics: Sequence[Metric]) -> Table:
    columns = [*metrics, GRAPH_MEMORY]
    return Table(
        ("job on the front", *(f"{metric.title} {metric.unit}" for metric in columns)),
        [[job.title, *(job.values.get(metric.key) for metric in columns)] for job in front],
    )
