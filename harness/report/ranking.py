"""Which jobs of a sweep may be set against each other, and which of them to use."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.record import Status
from harness.report.sweep_rows import (
    GRAPH_MEMORY,
    STEP_AT_BATCH,
    STEP_WORKLOAD,
    TPOT_MEDIAN,
    TPOT_P99,
    Metric,
    Sweep,
    SweepJob,
)
from harness.report.verdict import RERUN_MARGIN

_OBJECTIVES = (STEP_WORKLOAD, STEP_AT_BATCH, TPOT_MEDIAN, TPOT_P99)


def comparable_jobs(sweep: Sweep) -> list[SweepJob]:
    """Return the jobs that may be set against each other: ended ok, verified, and not emulated unless
    all are."""
    ok = [job for job in sweep.jobs if job.status in (Status.OK, Status.SKIPPED) and not job.is_unverified]
    real = [job for job in ok if not job.is_emulated]
    return real or ok


def objectives(sweep: Sweep) -> list[Metric]:
    """Return the step times that jobs of this sweep have."""
    jobs = comparable_jobs(sweep)
    return [metric for metric in _OBJECTIVES if any(job.values.get(metric.key) is not None for job in jobs)]


def pareto_front(jobs: Sequence[SweepJob], metric: Metric) -> list[SweepJob]:
    """Return the jobs that no other beats in `metric` and graph memory at once, by rising memory."""
    placed = [
        (memory, value, job)
        for job in jobs
        if (memory := job.values.get(GRAPH_MEMORY.key)) is not None
        and (value := job.values.get(metric.key)) is not None
    ]
    front: list[SweepJob] = []
    best = math.inf
    for _, value, job in sorted(placed, key=lambda entry: entry[:2]):
        if value < best:
            best = value
            front.append(job)
    return front


def close_to_best(jobs: Sequence[SweepJob], metric: Metric) -> list[SweepJob]:
    """Return the jobs that a re-run could put first, best first: within the margin and their own error."""
    placed = sorted(
        ((value, job) for job in jobs if (value := job.values.get(metric.key)) is not None),
        key=lambda entry: entry[0],
    )
    if not placed:
        return []
    best, winner = placed[0]

    def slack(job: SweepJob) -> float:
        errors = [(other.step_error or 0.0) if metric is STEP_AT_BATCH else 0.0 for other in (winner, job)]
        return math.hypot(RERUN_MARGIN, *errors)

    return [job for value, job in placed if value <= best * (1 + slack(job))]
