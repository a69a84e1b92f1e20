"""SAME, FAST, SLOW or AMBIGUOUS: whether two medians differ by more than a re-run of the same thing would."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import NormalDist, median

from harness.report.bootstrap import MedianError, student_quantile

#: What 95 in 100 re-runs of the same thing differ by at most, as a share, unless told otherwise.
RERUN_MARGIN = 0.02
#: A median is not called the SAME if a change of this share could have gone unseen.
MAX_BLUR = 0.10
#: A change of less than this share is SAME, however sure it is.
MIN_EFFECT = 0.01
#: A difference is SAME within the 98% interval of a re-run, and FAST or SLOW outside the 99.9% interval:
#: of 60 rows that did not change, the second bound is passed by chance in one comparison out of 33.
_SAME, _DIFFERENT = 0.99, 0.9995
#: What moves the samples of a run has slow parts that move whole runs: this share of it is assumed to.
_SLOW_SHARE = 0.25
_MIN_NEIGHBOURS = 4
#: Degrees of freedom from which Student's t is as good as normal.
_MANY = 2000.0
#: Median of the absolute value of a standard normal variable.
_NORMAL_MAD = 0.6745


class Verdict(StrEnum):
    """How B compares with A."""

    SAME = "SAME"
    FAST = "FAST"
    SLOW = "SLOW"
    AMBIGUOUS = "AMBIGUOUS"


@dataclass(frozen=True)
class Judgement:
    """A change of the median from A to B as a share (0.05: B is 5% slower), and what to think of it.

    `blur` is the smallest change that would have stood out. `low` and `high` bound the change.
    """

    verdict: Verdict
    change: float
    low: float
    high: float
    blur: float
    reason: str = ""


def judge(
    a: MedianError, b: MedianError, rerun_error: float, max_blur: float, min_effect: float = MIN_EFFECT
) -> Judgement:
    """Judge one pair of series.

    Args:
        a, b: medians with the uncertainty that the samples of a run show.
        rerun_error: standard deviation of the log ratio of two runs of the same thing beyond that;
            see `rerun_error`. One run cannot show it.
        max_blur: a change is not called SAME if less than this could have gone unseen.
        min_effect: a change of less than this is never FAST or SLOW.
    """
    log_ratio = math.log(b.median / a.median)
    same, different = (_half_width(a, b, rerun_error, p) for p in (_SAME, _DIFFERENT))
    verdict, reason = Verdict.SAME, ""
    is_worth_a_word = abs(log_ratio) > math.log1p(min_effect)
    if is_worth_a_word and abs(log_ratio) > different:
        verdict = Verdict.SLOW if log_ratio > 0 else Verdict.FAST
    elif is_worth_a_word and abs(log_ratio) > same:
        verdict, reason = Verdict.AMBIGUOUS, "near the limit"
    elif math.expm1(same) > max_blur:
        is_alone = math.isinf(same)
        verdict, reason = Verdict.AMBIGUOUS, "one sample a run" if is_alone else f"noise hides {max_blur:.0%}"
    low, high = math.expm1(log_ratio - same), math.expm1(min(log_ratio + same, 100.0))
    return Judgement(verdict, math.expm1(log_ratio), low, high, math.expm1(min(same, 100.0)), reason)


def rerun_error(pairs: Sequence[Sequence[tuple[MedianError, MedianError]]], margin: float) -> float:
    """Return the standard deviation of the log ratio of two runs of the same thing.

    At least `margin` (a share; 95 in 100 re-runs differ by less), and more where the samples scatter:
    a machine that is busy within a run is busy between runs too. More also where the pairs disagree: over
    the batch sizes of a mode a change moves neighbours alike, and what moves them apart is noise. The
    median over neighbours lets a change at some batch sizes stand out.

    Args:
        pairs: for each mode and context length, (A, B) by rising batch size.
        margin: as a share.
    """
    assumed = math.log1p(margin) / NormalDist().inv_cdf(0.975)
    spreads = [math.hypot(a.spread, b.spread) for row in pairs for a, b in row]
    within = _SLOW_SHARE * median(spreads) if spreads else 0.0
    return max(assumed, within, _neighbour_error(pairs))


def repeat_error(
    sides: Sequence[Sequence[MedianError]], num_runs: tuple[int, int], margin: float
) -> float | None:
    """Return the same for two sides that were repeated, from what the repeats differ by; None without any.

    The variance between the runs of a side is pooled over all points and both sides, which must have at
    least four degrees of freedom. Half of `margin` is assumed at least: few repeats in a row see a machine in
    one mood.

    Args:
        sides: for each point, the runs of A and the runs of B.
        num_runs: runs of A, runs of B.
        margin: as a share; see `rerun_error`.
    """
    squares, degrees = 0.0, 0
    for runs in sides:
        logs = [math.log(run.median) for run in runs]
        mean = sum(logs) / len(logs)
        squares += sum((value - mean) ** 2 for value in logs)
        degrees += len(logs) - 1
    if degrees < _MIN_NEIGHBOURS:
        return None
    of_one_run = math.sqrt(squares / degrees)
    assumed = math.log1p(margin) / NormalDist().inv_cdf(0.975) / 2
    seen = of_one_run * math.sqrt(sum(1 / num for num in num_runs))
    return max(assumed, seen)


def _neighbour_error(pairs: Sequence[Sequence[tuple[MedianError, MedianError]]]) -> float:
    """Return by what neighbouring pairs disagree beyond what their samples explain."""
    jumps = [
        abs(math.log(later[1].median / later[0].median) - math.log(earlier[1].median / earlier[0].median))
        for row in pairs
        for earlier, later in pairwise(row)
    ]
    if len(jumps) < _MIN_NEIGHBOURS:
        return 0.0
    sampling = median(math.hypot(a.log_error, b.log_error) for row in pairs for a, b in row)
    apart = median(jumps) / (_NORMAL_MAD * math.sqrt(2))
    return math.sqrt(max(0.0, apart**2 - sampling**2))


def _half_width(a: MedianError, b: MedianError, rerun: float, probability: float) -> float:
    """Half width of the interval of the log ratio that a re-run of the same thing stays in."""
    sampling = math.hypot(a.log_error, b.log_error)
    if math.isinf(sampling):
        return math.inf
    by_samples = student_quantile(probability, _degrees(a, b)) * sampling
    return math.hypot(by_samples, NormalDist().inv_cdf(probability) * rerun)


def _degrees(a: MedianError, b: MedianError) -> float:
    """Degrees of freedom of the sum of two estimated variances (Welch and Satterthwaite)."""
    parts = [(error.log_error**2, max(1, error.num_blocks - 1)) for error in (a, b)]
    total = sum(variance for variance, _ in parts)
    degrees = total**2 / sum(variance**2 / df for variance, df in parts) if total else math.inf
    return min(degrees, _MANY)
