"""The verb compare: two jobs, or repeats of two, batch size by batch size."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from harness.errors import ConfigError
from harness.report.bootstrap import MedianError, median_error, pooled
from harness.report.comparable import Metric, Point, Series, Side, check_comparable, load_runs
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
one configuration. Each batch size has a row for step, the time until the tokens can be read, and where a CUDA
graph ran one for replay, its device time: a busy host hides a change of the first, hardly one of the second.
--metric chooses; of back_to_back a run has one figure, so only repeats (A1,A2,A3) can judge it.

A row is SLOW or FAST when the medians differ by more than a re-run of the same thing would (99.9% interval)
and by more than --min-effect, SAME when they differ by no more than that (98% interval), else AMBIGUOUS: "noise
hides 10%" (--max-blur), "near the limit" (between the two intervals) or "one sample a run". The interval is a
block bootstrap of the medians of samples.parquet, widened by what two runs differ by: seen between the repeats
of a side, else --margin, or more where neighbouring batch sizes disagree.

Exit code: 0; 1 with --fail-on-slow if a row is SLOW, whatever its metric; 2 if the two cannot be compared.
"""


@dataclass(frozen=True)
class Row:
    """One point in both jobs, by one metric."""

    point: Point
    metric: Metric
    a: Series
    b: Series
    a_median: MedianError
    b_median: MedianError
    judgement: Judgement


@dataclass(frozen=True)
class Comparison:
    """Two sides, each one run or its repeats, and the points that all runs measured, ordered by context
    length, mode, batch size and metric."""

    a_runs: Sequence[Side]
    b_runs: Sequence[Side]
    rows: list[Row]

    @property
    def a(self) -> Side:
        return self.a_runs[0]

    @property
    def b(self) -> Side:
        return self.b_runs[0]

    def of(self, metric: Metric) -> list[Row]:
        return [row for row in self.rows if row.metric is metric]

    def count(self, verdict: Verdict) -> int:
        return Counter(row.judgement.verdict for row in self.rows)[verdict]

    def num_alone(self, side: Side) -> int:
        """How many points of a side have samples of a metric that was judged, and no row."""
        metrics, points = {row.metric for row in self.rows}, {row.point for row in self.rows}
        return sum(
            point not in points and not metrics.isdisjoint(series.samples_ms)
            for point, series in side.series.items()
        )


def main(argv: Sequence[str]) -> int:
    """Run the verb and return its exit code. Raises ConfigError for what cannot be compared."""
    options = _parser().parse_args(argv)
    a_runs, b_runs = load_runs("A", options.a), load_runs("B", options.b)
    for side in a_runs:
        for other in b_runs:
            check_comparable(side, other, options.allow_unverified, options.allow_unlike)
    shares = (options.margin / 100, options.max_blur / 100, options.min_effect / 100)
    comparison = compare(a_runs, b_runs, *shares, [Metric(name) for name in options.metric or ()])
    from harness.report.compare_table import print_markdown, print_table

    (print_markdown if options.markdown else print_table)(comparison)
    return 1 if options.fail_on_slow and comparison.count(Verdict.SLOW) else 0


def compare(
    a_runs: Sequence[Side],
    b_runs: Sequence[Side],
    margin: float = RERUN_MARGIN,
    max_blur: float = MAX_BLUR,
    min_effect: float = MIN_EFFECT,
    metrics: Sequence[Metric] = (),
) -> Comparison:
    """Judge every point that all runs measured, by each metric: as asked, else step, and replay of CUDA graphs.

    `margin`, `max_blur`, `min_effect` are shares; see `judge`. Raises ConfigError where no point is shared.
    """
    rows: list[Row] = []
    for metric in dict.fromkeys(metrics or (Metric.STEP, Metric.REPLAY)):
        points = _shared_points((*a_runs, *b_runs), metric, is_asked=bool(metrics))
        if not points and (metrics or metric is Metric.STEP):
            raise ConfigError(
                "B", b_runs[0].path, f"has no batch size, mode and context length with samples of {metric} in "
                f"common with {a_runs[0].path}; give both jobs the same measure.batch_sizes and "
                "measure.context_lens",
            )  # fmt: skip
        for group in _kindred(points, metric):
            errors = {
                point: (
                    [median_error(run.series[point].samples_ms[metric], seed=0) for run in a_runs],
                    [median_error(run.series[point].samples_ms[metric], seed=1) for run in b_runs],
                )
                for point in group
            }
            judgements = _judge_all(errors, (len(a_runs), len(b_runs)), margin, max_blur, min_effect)
            rows += [
                Row(point, metric, a_runs[0].series[point], b_runs[0].series[point], *judgements[point])
                for point in group
            ]
    return Comparison(a_runs, b_runs, sorted(rows, key=lambda row: _order(row.point)))


def _shared_points(runs: Sequence[Side], metric: Metric, is_asked: bool) -> list[Point]:
    """Return the points of which all runs have samples. Unless asked, replay is that of CUDA graphs only:
    around an eager step the events enclose what the host takes to launch it."""

    def has(series: Series) -> bool:
        is_wanted = is_asked or metric is not Metric.REPLAY or series.graph_backend == "cuda"
        return is_wanted and metric in series.samples_ms

    shared = set.intersection(*({p for p, series in run.series.items() if has(series)} for run in runs))
    return sorted(shared, key=_order)


def _kindred(points: list[Point], metric: Metric) -> list[list[Point]]:
    """Split the points into those that the same noise moves: the host moves all steps, whatever their mode,
    but hardly the replay and the pace of graphs, as it does those of eager steps."""
    if metric is Metric.STEP:
        return [points]
    modes = dict.fromkeys(point.mode for point in points)
    return [[point for point in points if point.mode == mode] for mode in modes]


def _judge_all(
    errors: Mapping[Point, tuple[list[MedianError], list[MedianError]]],
    num_runs: tuple[int, int],
    margin: float,
    max_blur: float,
    min_effect: float,
) -> dict[Point, tuple[MedianError, MedianError, Judgement]]:
    """Judge points by rising batch size, given the medians of the runs of A and of B, so many runs each."""
    medians = {point: (pooled(a), pooled(b)) for point, (a, b) in errors.items()}
    curves: dict[tuple[int, str], list[tuple[MedianError, MedianError]]] = {}
    for point, pair in medians.items():
        curves.setdefault((point.context_len, point.mode), []).append(pair)
    sides = [side for pair in errors.values() for side in pair]
    between_runs = repeat_error(sides, num_runs, margin)
    if between_runs is None:
        between_runs = rerun_error(list(curves.values()), margin)
    else:
        medians = {point: (_settled(a), _settled(b)) for point, (a, b) in medians.items()}
    return {
        point: (*pair, judge(*pair, between_runs, max_blur, min_effect)) for point, pair in medians.items()
    }


def _settled(error: MedianError) -> MedianError:
    """Repeats differ by all that the only sample of a run leaves open."""
    return replace(error, log_error=0.0) if math.isinf(error.log_error) else error


def _order(point: Point) -> tuple[int, bool, str, int]:
    """By context length, graphs first, then batch size."""
    return point.context_len, point.mode != "graph", point.mode, point.batch_size


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness compare",
        description="Say for each batch size whether job B is as fast as job A, faster or slower.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("a", metavar="A", help="folder of the first job, the baseline; or of its repeats")
    parser.add_argument("b", metavar="B", help="folder of the second job, or of its repeats")
    parser.add_argument("--fail-on-slow", action="store_true", help="exit with 1 if a row is SLOW")
    parser.add_argument("--metric", action="append", choices=[metric.value for metric in Metric],
                        help="judge by this alone; may be given again (default: step, and replay of CUDA graphs)")  # fmt: skip
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
