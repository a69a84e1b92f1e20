"""The verb compare: two jobs, or repeats of two, batch size by batch size."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from harness.report.bootstrap import MedianError, median_error, pooled
from harness.report.comparable import Point, Series, Side, check_comparable, load_runs
from harness.report.verdict import (
    MAX_BLUR,
    MIN_EFFECT,
    RERUN_MARGIN,
    Judgement,
    Verdict,
    judge,
    repeat_error,
    rerun_error,
)

_EPILOG = """\
A side is the folder of one job, several with commas between (A1,A2), or the folder of a sweep: repeats of
one configuration. A row is SLOW or FAST when the medians differ by more than a re-run of the same thing
would (99.9% interval) and by more than --min-effect, SAME when they differ by no more than that (98%
interval), else AMBIGUOUS. The interval is a block bootstrap of the medians of samples.parquet, widened by
what two runs differ by: seen between the repeats of a side, else --margin, or more where neighbouring batch
sizes disagree. Each row says which change it could have seen.

Exit code: 0; 1 with --fail-on-slow if a row is SLOW; 2 if the two cannot be compared.
"""


@dataclass(frozen=True)
class Row:
    """One point in both jobs."""

    point: Point
    a: Series
    b: Series
    a_median: MedianError
    b_median: MedianError
    judgement: Judgement


@dataclass(frozen=True)
class Comparison:
    """Two sides, each one run or its repeats, and the points that all runs measured, ordered by context
    length, mode and batch size."""

    a_runs: Sequence[Side]
    b_runs: Sequence[Side]
    rows: list[Row]
    #: Standard deviation of the log ratio of the two sides if they are the same thing, assumed or seen.
    rerun_error: float

    @property
    def a(self) -> Side:
        return self.a_runs[0]

    @property
    def b(self) -> Side:
        return self.b_runs[0]

    def count(self, verdict: Verdict) -> int:
        return Counter(row.judgement.verdict for row in self.rows)[verdict]


def main(argv: Sequence[str]) -> int:
    """Run the verb and return its exit code. Raises ConfigError for what cannot be compared."""
    options = _parser().parse_args(argv)
    a_runs, b_runs = load_runs("A", options.a), load_runs("B", options.b)
    for side in a_runs:
        for other in b_runs:
            check_comparable(side, other, options.allow_unverified, options.allow_unlike)
    shares = (options.margin / 100, options.max_blur / 100, options.min_effect / 100)
    comparison = compare(a_runs, b_runs, *shares)
    from harness.report.compare_table import print_markdown, print_table

    (print_markdown if options.markdown else print_table)(comparison)
    return 1 if options.fail_on_slow and comparison.count(Verdict.SLOW) else 0


def compare(
    a_runs: Sequence[Side],
    b_runs: Sequence[Side],
    margin: float = RERUN_MARGIN,
    max_blur: float = MAX_BLUR,
    min_effect: float = MIN_EFFECT,
) -> Comparison:
    """Judge every point that all runs measured. `margin`, `max_blur`, `min_effect` are shares; see `judge`."""
    shared = set.intersection(*(set(run.series) for run in (*a_runs, *b_runs)))
    points = sorted(shared, key=_order)
    errors = {
        point: ([_median(run, point, 0) for run in a_runs], [_median(run, point, 1) for run in b_runs])
        for point in points
    }
    medians = {point: (pooled(a), pooled(b)) for point, (a, b) in errors.items()}
    curves: dict[tuple[int, str], list[tuple[MedianError, MedianError]]] = {}
    for point in points:
        curves.setdefault((point.context_len, point.mode), []).append(medians[point])
    sides = [side for pair in errors.values() for side in pair]
    between_runs = repeat_error(sides, (len(a_runs), len(b_runs)), margin)
    if between_runs is None:
        between_runs = rerun_error(list(curves.values()), margin)
    rows = [
        Row(point, a_runs[0].series[point], b_runs[0].series[point], *medians[point],
            judge(*medians[point], between_runs, max_blur, min_effect))
        for point in points
    ]  # fmt: skip
    return Comparison(a_runs, b_runs, rows, between_runs)


def _median(run: Side, point: Point, seed: int) -> MedianError:
    return median_error(run.series[point].step_ms, seed)


def _order(point: Point) -> tuple[int, bool, str, int]:
    """By context length, graphs first, then batch size."""
    return point.context_len, point.mode != "graph", point.mode, point.batch_size


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cudagraph-harness compare",
        description="Say for each batch size whether job B is as fast as job A, faster or slower.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("a", metavar="A", help="folder of the first job, the baseline; or of its repeats")
    parser.add_argument("b", metavar="B", help="folder of the second job, or of its repeats")
    parser.add_argument("--fail-on-slow", action="store_true", help="exit with 1 if a row is SLOW")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.add_argument("--allow-unverified", action="store_true", help="compare jobs without passed parity")
    parser.add_argument(
        "--allow-unlike", action="store_true", help="compare across machines, versions or models"
    )
    parser.add_argument("--margin", type=_percent, default=100 * RERUN_MARGIN, metavar="PERCENT",
                        help="what 95 in 100 re-runs of the same thing differ by at most (default 2)")  # fmt: skip
    parser.add_argument("--min-effect", type=_percent, default=100 * MIN_EFFECT, metavar="PERCENT",
                        help="a smaller change is SAME, however sure it is (default 1)")  # fmt: skip
    parser.add_argument("--max-blur", type=_percent, default=100 * MAX_BLUR, metavar="PERCENT",
                        help="not SAME if a change of this size could have gone unseen (default 10)")  # fmt: skip
    return parser


def _percent(text: str) -> float:
    value = float(text)
    if not 0 < value < 100:
        raise argparse.ArgumentTypeError("give a percentage between 0 and 100")
    return value
