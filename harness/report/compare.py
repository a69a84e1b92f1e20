"""The verb compare: two jobs, batch size by batch size."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.report.bootstrap import MedianError, median_error
from harness.report.comparable import Point, Series, Side, check_comparable, load_side
from harness.report.verdict import MAX_BLUR, RERUN_MARGIN, Judgement, Verdict, judge, rerun_error

_EPILOG = """\
A row is SLOW or FAST when the medians differ by more than a re-run of the same thing would (99.9%
interval), SAME when they differ by no more than that (98% interval), else AMBIGUOUS. The interval is a
block bootstrap of the medians of samples.parquet, widened by what two runs differ by: --margin, or
more where neighbouring batch sizes disagree. Each row says which change it could have seen.

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
    """Two jobs and the points that both measured, ordered by context length, mode and batch size."""

    a: Side
    b: Side
    rows: list[Row]
    #: Standard deviation of the log ratio of two runs of the same thing, assumed or seen.
    rerun_error: float

    def count(self, verdict: Verdict) -> int:
        return Counter(row.judgement.verdict for row in self.rows)[verdict]


def main(argv: Sequence[str]) -> int:
    """Run the verb and return its exit code. Raises ConfigError for what cannot be compared."""
    options = _parser().parse_args(argv)
    a, b = load_side("A", Path(options.a)), load_side("B", Path(options.b))
    check_comparable(a, b, options.allow_unverified, options.allow_unlike)
    comparison = compare(a, b, options.margin / 100, options.max_blur / 100)
    from harness.report.compare_table import print_markdown, print_table

    (print_markdown if options.markdown else print_table)(comparison)
    return 1 if options.fail_on_slow and comparison.count(Verdict.SLOW) else 0


def compare(a: Side, b: Side, margin: float = RERUN_MARGIN, max_blur: float = MAX_BLUR) -> Comparison:
    """Judge every point that both jobs measured. `margin` and `max_blur` are shares; see `judge`."""
    points = sorted(a.series.keys() & b.series.keys(), key=_order)
    medians = {
        point: (median_error(a.series[point].step_ms, seed=0), median_error(b.series[point].step_ms, seed=1))
        for point in points
    }
    curves: dict[tuple[int, str], list[tuple[MedianError, MedianError]]] = {}
    for point in points:
        curves.setdefault((point.context_len, point.mode), []).append(medians[point])
    between_runs = rerun_error(list(curves.values()), margin)
    rows = [
        Row(point, a.series[point], b.series[point], *medians[point],
            judge(*medians[point], between_runs, max_blur))
        for point in points
    ]  # fmt: skip
    return Comparison(a, b, rows, between_runs)


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
    parser.add_argument("a", metavar="A", help="folder of the first job: the baseline")
    parser.add_argument("b", metavar="B", help="folder of the second job")
    parser.add_argument("--fail-on-slow", action="store_true", help="exit with 1 if a row is SLOW")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.add_argument("--allow-unverified", action="store_true", help="compare jobs without passed parity")
    parser.add_argument(
        "--allow-unlike", action="store_true", help="compare across machines, versions or models"
    )
    parser.add_argument("--margin", type=_percent, default=100 * RERUN_MARGIN, metavar="PERCENT",
                        help="what 95 in 100 re-runs of the same thing differ by at most (default 2)")  # fmt: skip
    parser.add_argument("--max-blur", type=_percent, default=100 * MAX_BLUR, metavar="PERCENT",
                        help="not SAME if a change of this size could have gone unseen (default 10)")  # fmt: skip
    return parser


def _percent(text: str) -> float:
    value = float(text)
    if not 0 < value < 100:
        raise argparse.ArgumentTypeError("give a percentage between 0 and 100")
    return value
