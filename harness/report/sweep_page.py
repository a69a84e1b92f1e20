"""The page of a sweep: which configurations to use, how sure that is, and every job in a table."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from harness.record import Status
from harness.report.figure import number
from harness.report.page import Banner, Fact, Page, Section, cell_text
from harness.report.parallel_chart import parallel_figure
from harness.report.pareto_chart import pareto_figure
from harness.report.ranking import close_to_best, comparable_jobs, objectives, pareto_front
from harness.report.sweep_rows import (
    GRAPH_MEMORY,
    METRICS,
    UNREADABLE,
    Metric,
    Sweep,
    SweepJob,
    read_sweep,
)
from harness.report.verdict import RERUN_MARGIN

_MAX_LISTED = 8
#: Settings that say what is run, not how.
_NOT_CHOSEN = ("workload", "model")


def sweep_page(folder: Path) -> Page:
    """Read the jobs of a sweep's folder and say which did best."""
    sweep = read_sweep(folder)
    figures = [figure for figure in (pareto_figure(sweep), parallel_figure(sweep)) if figure is not None]
    return Page(
        title=f"Sweep of {len(sweep.jobs)} jobs",
        subtitle=str(folder),
        banners=list(_banners(sweep)),
        is_emulated=any(job.is_emulated for job in comparable_jobs(sweep)),
        is_unverified=_all_unverified(sweep),
        sections=[
            Section("overview", "Overview", facts=list(_facts(sweep)), markup=_verdicts(sweep)),
            Section("trade-off", "Trade-off", figures=figures[:1]),
            Section("settings", "Settings", figures=figures[1:]),
            Section("jobs", "Jobs", markup=_jobs_table(sweep)),
        ],
        footer="Made by python -m harness report from the recorded files.",
        warnings=_left_out(sweep),
    )


def _all_unverified(sweep: Sweep) -> bool:
    measured = [job for job in sweep.jobs if any(value is not None for value in job.values.values())]
    return bool(measured) and all(job.is_unverified for job in measured)


def _left_out(sweep: Sweep) -> list[str]:
    return [f"job {job.name} is left out: {job.error}" for job in sweep.jobs if job.status == UNREADABLE]


def _banners(sweep: Sweep) -> Iterator[Banner]:
    for warning in _left_out(sweep)[:_MAX_LISTED]:
        yield Banner("Unreadable", warning)
    unverified = [job.name for job in sweep.jobs if job.is_unverified]
    if unverified:
        yield Banner("UNVERIFIED", f"In {_listed(unverified)} replay was not proven equal to eager; do not rely on "
                     "their figures. They are marked in the table and left out of the front.", is_bad=True)  # fmt: skip
    emulated = [job.name for job in sweep.jobs if job.is_emulated]
    if emulated:
        who = "all jobs" if len(emulated) == len(sweep.jobs) else _listed(emulated)
        yield Banner(
            "Emulated",
            f"In {who} graphs were emulated without CUDA: no latency of theirs is that of a CUDA graph.",
        )
    bad = Counter(job.status for job in sweep.jobs if job.status not in (Status.OK, Status.SKIPPED))
    if bad:
        yield Banner(
            "Not ok", ", ".join(f"{count} {status}" for status, count in bad.items()) + ": see the table."
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_LISTED])
    return f"job {shown}" + (f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else "")


def _facts(sweep: Sweep) -> Iterator[Fact]:
    num_ok = sum(job.status in (Status.OK, Status.SKIPPED) for job in sweep.jobs)
    yield Fact("jobs", str(len(sweep.jobs)), f"{num_ok} ok")
    keys = dict.fromkeys(key for job in sweep.jobs for key in job.varied)
    if keys:
        yield Fact("varied", str(len(keys)), ", ".join(keys))
    jobs = comparable_jobs(sweep)
    for metric in objectives(sweep)[:1]:
        best = close_to_best(jobs, metric)[0]
        yield Fact(
            f"best {sweep.title_of(metric)}",
            f"{number(best.values[metric.key])} {metric.unit}",
            best.title,
        )
    cheapest = [job for metric in objectives(sweep)[:1] for job in pareto_front(jobs, metric)[:1]]
    for job in cheapest:
        yield Fact("least memory on the front", f"{job.values[GRAPH_MEMORY.key]:,.1f} MiB", job.title)


def _verdicts(sweep: Sweep) -> str:
    """Say which job wins each step time, and which of those that a re-run could put first is cheapest."""
    jobs = comparable_jobs(sweep)
    lines = "".join(f"<li>{html.escape(_verdict(sweep, jobs, metric))}</li>" for metric in objectives(sweep))
    if not lines:
        return '<p class="note">No job has figures that may be compared.</p>'
    note = f"Jobs within {RERUN_MARGIN:.0%} of each other can change places when they run again."
    unlike = [
        key for key in dict.fromkeys(key for job in jobs for key in job.varied) if key.startswith(_NOT_CHOSEN)
    ]
    if unlike:
        note += (
            f" These jobs differ in {', '.join(unlike)} too: a faster step there may be lighter traffic or a smaller "
            "model, not a better configuration. Filter the table to compare like with like."
        )
    return f'<ul>{lines}</ul><p class="note">{html.escape(note)}</p>'


def _verdict(sweep: Sweep, jobs: list[SweepJob], metric: Metric) -> str:
    close = close_to_best(jobs, metric)
    said = (
        f"{sweep.title_of(metric)}: best is job {close[0].title} with "
        f"{number(close[0].values[metric.key])} {metric.unit}"
    )
    if len(close) == 1:
        return said + "; no other job comes near enough to be confused with it."
    said += f"; {len(close) - 1} more {'is' if len(close) == 2 else 'are'} too close to tell apart"
    leanest = pareto_front(close, metric)[:1]
    if leanest and leanest[0] is not close[0]:
        memory = number(leanest[0].values[GRAPH_MEMORY.key])
        said += f", of which job {leanest[0].title} needs the least graph memory, {memory} MiB"
    return said + "."


def _jobs_table(sweep: Sweep) -> str:
    """Return the table that page.js sorts, filters and links to the charts. Numbers stand in
    `data-value`, empty where nothing was measured."""
    keys = list(dict.fromkeys(key for job in sweep.jobs for key in job.varied))
    metrics = [
        metric for metric in METRICS if any(job.values.get(metric.key) is not None for job in sweep.jobs)
    ]
    titles = [f"{sweep.title_of(metric)}, {metric.unit}" for metric in metrics]
    heads = "".join(
        f'<th scope="col"{"" if is_number else " class=text"}><button type="button">{html.escape(title)}</button></th>'
        for title, is_number in [
            ("job", False),
            ("status", False),
            *((key, False) for key in keys),
            *((t, True) for t in titles),
        ]
    )
    rows = "".join(
        _job_row(job, sweep.folder, keys, [job.values.get(metric.key) for metric in metrics])
        for job in sweep.jobs
    )
    return (
        '<p class="controls"><label>Filter <input type="search" id="filter" placeholder="words, as: split ok" '
        'autocomplete="off"></label> <span id="filter-count" role="status"></span></p>'
        '<div class="scroll tall" tabindex="0" role="region" aria-label="Jobs">'
        f'<table class="jobs"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _job_row(job: SweepJob, folder: Path, keys: list[str], values: list[float | None]) -> str:
    marks = "".join(
        f' <span class="badge {kind}">{word}</span>'
        for word, kind, applies in (
            ("emulated", "", job.is_emulated),
            ("UNVERIFIED", "bad", job.is_unverified),
        )
        if applies
    )
    status_class = "status-ok" if job.status in (Status.OK, Status.SKIPPED) else "status-bad"
    error = f' title="{html.escape(job.error[:300])}"' if job.error else ""
    number = html.escape(str(float(job.name))) if job.name.isdigit() else None
    sort_value = f' data-value="{number}"' if number else ""
    name = html.escape(job.name)
    cells = "".join(
        f'<td class="text" title="{html.escape(v)}">{html.escape(v)}</td>'
        for v in (job.varied.get(key, "") for key in keys)
    )
    numbers = "".join(
        f'<td data-value="{"" if value is None else repr(float(value))}">{cell_text(value)}</td>'
        for value in values
    )
    page = (
        ""
        if job.page is None
        else f' <a href="{html.escape(job.page)}" aria-label="page of job {name}">page</a>'
    )
    return (
        f'<tr data-job="{name}"><td class="text"{sort_value}><button type="button" aria-label="show job {name}">{name}</button>{page}</td>'
        f'<td class="text"{error}><span class="{status_class}">{html.escape(job.status)}</span>{marks}'
        f"{_error_text(job)}</td>{cells}{numbers}</tr>"
    )


def _error_text(job: SweepJob) -> str:
    return f"<br><small>{html.escape(job.error.splitlines()[0][:90])}</small>" if job.error else ""
