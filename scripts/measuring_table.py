#!/usr/bin/env python3
"""Print what one size sweep measured by each kind of timing, as Markdown; or put it into a page.

    measuring_table.py JOB [--flushed JOB] [--into docs/measuring.md --name h200]

JOB is a job's folder. `--flushed` names a second one, of the same configuration with
`measure.flush_cache=true`. `--into` replaces what stands between `<!-- table: NAME -->` and
`<!-- end of table -->` in a page.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness.record_reader import read_result, read_table

Row = Mapping[str, Any]
_HEADS = (
    "batch", "mode", "isolated ms", "replay ms", "back to back ms", "host prepare µs",
    "isolated ms, cache flushed", "SM MHz", "W", "mJ a token",
)  # fmt: skip


def main() -> int:
    options = _parser().parse_args()
    text = "\n".join(table(options.job, options.flushed)) + "\n"
    if options.into is None:
        print(text, end="")
        return 0
    page = options.into.read_text(encoding="utf-8")
    found = re.compile(rf"(<!-- table: {re.escape(options.name)} -->\n).*?(<!-- end of table -->)", re.S)
    if not found.search(page):
        print(f"{options.into} has no <!-- table: {options.name} -->", file=sys.stderr)
        return 2
    options.into.write_text(found.sub(lambda m: m[1] + text + m[2], page), encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", type=Path)
    parser.add_argument("--flushed", type=Path)
    parser.add_argument("--into", type=Path)
    parser.add_argument("--name", default="h200")
    return parser


def table(job: Path, flushed: Path | None) -> Iterator[str]:
    """Yield the lines: where it was measured, a row a batch size and mode, and what measuring cost."""
    result = read_result(job)
    environment = result["environment"]
    emulated = "**emulated graphs, no CUDA**; " if result["graph_backend"] == "emulated" else ""
    device = environment["device_name"] or environment["cpu"]
    yield f"{device}, {emulated}{result['model']['name']}, torch {environment['versions']['torch']}, " + (
        f"{result['started_at'][:10]}:"
    )
    yield ""
    yield "| " + " | ".join(_HEADS) + " |"
    yield "|" + "|".join("---" for _ in _HEADS) + "|"
    with_flush = (
        {} if flushed is None else {_key(row): row for row in read_table(flushed, "sizes").to_pylist()}
    )
    for row in read_table(job, "sizes").to_pylist():
        other = with_flush.get(_key(row), {})
        figures = (
            *(_ms(row[name]) for name in ("step_ms_p50", "replay_ms_p50", "back_to_back_ms")),
            _whole(row["host_prepare_us_p50"]),
            _ms(other.get("step_ms_p50")),
            *(_whole(row[name]) for name in ("sm_clock_mhz", "power_w")),
            _ms(row["energy_mj_per_token"]),
        )
        yield f"| {row['batch_size']} | {row['mode']} | " + " | ".join(figures) + " |"
    yield ""
    overhead = result["size_sweep"]["overhead"]
    yield f"Measuring itself took {overhead['measuring_share']:.2%} of the sweep's {overhead['wall_s']:.1f} s."


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("context_len", "batch_size", "padded_batch_size", "mode"))


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _whole(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


if __name__ == "__main__":
    sys.exit(main())
