"""A comparison as a table for the terminal, and as Markdown."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from harness.report.comparable import Metric, config_differences, differences, is_verified
from harness.report.compare import Comparison, Row
from harness.report.verdict import Verdict

if TYPE_CHECKING:
    from rich.console import Console

_HEADS = (
    "context",
    "mode",
    "batch",
    "padded to",
    "metric",
    "A p50 ms",
    "B p50 ms",
    "change",
    "interval",
    "verdict",
)
_STYLES = {Verdict.SAME: "", Verdict.FAST: "green", Verdict.SLOW: "bold red", Verdict.AMBIGUOUS: "yellow"}
_WORDS = ("mode", "metric", "verdict")
_WIDTH = 128


def print_table(comparison: Comparison, console: Console | None = None) -> None:
    """Print the comparison on stdout unless another console is given."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    for line in _heading(comparison):
        console.print(Text(line, style="bold red" if line.startswith("UNVERIFIED") else ""), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for head in _HEADS:
        table.add_column(head, justify="left" if head in _WORDS else "right", overflow="fold")
    for row in comparison.rows:
        *cells, verdict = cells_of(row)
        table.add_row(*cells, Text(verdict, style=_STYLES[row.judgement.verdict]))
    console.print(table)
    for line in _ending(comparison):
        console.print(Text(line), soft_wrap=True)


def print_markdown(comparison: Comparison) -> None:
    """Print the comparison on stdout as Markdown, for a pull request."""
    print("\n".join(markdown_lines(comparison)))


def markdown_lines(comparison: Comparison) -> Iterator[str]:
    """Yield the comparison as lines of Markdown. What records say stays text: `|` and `<` are escaped."""
    for line in _heading(comparison):
        yield f"{_escaped(line)}  "
    yield ""
    yield "| " + " | ".join(_HEADS) + " |"
    yield "|" + "|".join(":--" if head in _WORDS else "--:" for head in _HEADS) + "|"
    for row in comparison.rows:
        *cells, verdict = (_escaped(cell) for cell in cells_of(row))
        word, _, reason = verdict.partition(" ")
        shown = word if row.judgement.verdict is Verdict.SAME else f"**{word}**"
        yield "| " + " | ".join([*cells, f"{shown} {reason}".strip()]) + " |"
    yield ""
    for line in _ending(comparison):
        yield f"{_escaped(line)}  "


def cells_of(row: Row) -> list[str]:
    """Return a row as text, in the order of the heads."""
    judgement = row.judgement
    padded = [
        str(size) if size is not None else "-" for size in (row.a.padded_batch_size, row.b.padded_batch_size)
    ]
    return [
        str(row.point.context_len or "-"),
        row.point.mode,
        str(row.point.batch_size),
        padded[0] if padded[0] == padded[1] else " → ".join(padded),
        row.metric.value,
        f"{row.a_median.median:.3f}",
        f"{row.b_median.median:.3f}",
        f"{judgement.change:+.1%}",
        f"{_bound(judgement.low)} … {_bound(judgement.high)}",
        judgement.verdict.value + (f" ({judgement.reason})" if judgement.reason else ""),
    ]


def _bound(share: float) -> str:
    return f"{share:+.1%}" if -0.995 < share < 10 else "any"


def _heading(comparison: Comparison) -> Iterator[str]:
    a, b = comparison.a, comparison.b
    for side, runs in ((a, comparison.a_runs), (b, comparison.b_runs)):
        repeats = f" and {len(runs) - 1} repeats of it" if len(runs) > 1 else ""
        yield f"{side.label}: {side.path}{repeats}"
    for side in (*comparison.a_runs, *comparison.b_runs):
        if not is_verified(side):
            yield f"UNVERIFIED: in {side.label} replay was not proven equal to eager; do not rely on its figures"
        if side.result["status"] != "ok":
            yield f"note: {side.label} ended {side.result['status']}; what it measured until then is compared"
    for line in differences(a, b):
        yield f"unlike: {line}"
    for line in config_differences(a, b):
        yield f"setting: {line}"


def _ending(comparison: Comparison) -> Iterator[str]:
    for metric in dict.fromkeys(row.metric for row in comparison.rows):
        yield from _sums(metric, comparison.of(metric))
    for side in (comparison.a, comparison.b):
        if num_alone := comparison.num_alone(side):
            yield f"{num_alone} rows are in {side.label} alone and were not compared."


def _sums(metric: Metric, rows: Sequence[Row]) -> Iterator[str]:
    verdicts = Counter(row.judgement.verdict for row in rows)
    yield f"{metric}, {len(rows)} rows: " + ", ".join(f"{verdicts[v]} {v}" for v in Verdict) + "."
    for mode in dict.fromkeys(row.point.mode for row in rows):
        changes = [row.judgement.change for row in rows if row.point.mode == mode]
        yield f"  {mode}: B takes {median(changes):+.1%} at the median of {len(changes)} batch sizes."
    blurs = [row.judgement.blur for row in rows if row.judgement.verdict is Verdict.SAME]
    if blurs:
        yield f"  SAME rows would have shown a change of {min(blurs):.1%} to {max(blurs):.1%}."


def _escaped(text: str) -> str:
    return (
        text.replace("\\", "\\\\")
        .replace("|", "\\|")
        .replace("<", "&lt;")
        .replace("*", "\\*")
        .replace("`", "\\`")
    )
