"""Loads request logs in their published formats: whole columns at once, a million rows in seconds.

Only the time and the two lengths of a request are read; prompts have no text here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.workload.base import Workload
from harness.workload.shaping import Shaping, shape
from harness.workload.trace_diagnosis import MAX_TOKENS, no_requests, refuse
from harness.workload.trace_file import check_columns, open_trace
from harness.workload.trace_formats import TraceFormat, trace_format

#: Mooncake's stamps are up to 3 ms off the multiples of 3 s (5999, 3530999).
_BUCKET_JITTER_S = 0.005

if TYPE_CHECKING:
    from numpy.typing import NDArray


def load_trace(
    path: str | Path,
    format_name: str,
    shaping: Shaping,
    columns: Mapping[str, str | None] | None = None,
    sec_multiplier: float = 1.0,
    seed: int = 0,
) -> Workload:
    """Load the trace at `path` (plain or gzip) and shape it.

    `columns` names the columns of format csv; `sec_multiplier` is the seconds of one unit of time in
    format timed_trace, as in vllm bench serve; `seed` spreads requests within the buckets of Mooncake's
    stamps. Raises ConfigError with the line number for the first line that cannot be used.
    """
    layout = trace_format(format_name, columns)
    check_columns(path, layout)
    time, prompt_len, output_len = _read(path, layout)
    notes: dict[str, int | float | str] = {}
    if layout.has_hash_ids:
        notes["hash_ids"] = "ignored: there is no prefix cache"
    if layout.unit == "ms":
        time = time / 1e3
    if format_name == "timed_trace":
        time = time * sec_multiplier
    if layout.bucket_s is not None:
        time = _spread(time, layout.bucket_s, seed, notes)
    return shape(time, prompt_len, output_len, shaping, notes)


def check_trace(path: str | Path, format_name: str, columns: Mapping[str, str | None] | None = None) -> None:
    """Raise ConfigError if the file is missing or lacks a column; reads one line, imports no pyarrow."""
    check_columns(path, trace_format(format_name, columns))


def _read(
    path: str | Path, layout: TraceFormat
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Read the three columns: seconds (or the file's unit) from the first row's, and token counts."""
    import pyarrow as pa

    try:
        table = _read_csv(path, layout) if layout.container == "csv" else _read_jsonl(path, layout)
        if not table.num_rows:
            raise no_requests(path)
        if any(table[name].null_count for name in layout.columns):
            raise refuse(path, layout, "a value is missing")
        time = _seconds(table[layout.timestamp])
        prompt_len, output_len = table[layout.prompt_len].to_numpy(), table[layout.output_len].to_numpy()
    except (pa.ArrowException, OSError, EOFError) as error:
        raise refuse(path, layout, str(error)) from error
    in_range = all(lens.min() >= 0 and lens.max() <= MAX_TOKENS for lens in (prompt_len, output_len))
    if not in_range or not np.isfinite(time).all():
        raise refuse(path, layout, "a value is out of range")
    return time, prompt_len, output_len


def _read_csv(path: str | Path, layout: TraceFormat) -> Any:
    import pyarrow as pa
    from pyarrow import csv

    types = [pa.string(), pa.int64(), pa.int64()]
    convert = csv.ConvertOptions(
        include_columns=list(layout.columns), column_types=dict(zip(layout.columns, types, strict=True))
    )
    with open_trace(path) as file:
        return csv.read_csv(file, convert_options=convert)


def _read_jsonl(path: str | Path, layout: TraceFormat) -> Any:
    import pyarrow as pa
    from pyarrow import json

    types = [pa.float64(), pa.int64(), pa.int64()]
    parse = json.ParseOptions(
        explicit_schema=pa.schema(list(zip(layout.columns, types, strict=True))),
        unexpected_field_behavior="ignore",
    )
    # A record may not span more than two blocks, and hash_ids make long ones.
    with open_trace(path) as file:
        return json.read_json(file, json.ReadOptions(block_size=16 << 20), parse)


def _seconds(column: Any) -> NDArray[np.float64]:
    """Convert stamps to seconds (numbers keep their unit); dates count from the first row.

    Arrow reads any number of fractional digits up to nine, and wants to know beforehand whether a date
    has an offset.
    """
    import pyarrow as pa

    if pa.types.is_floating(column.type):
        return _as_float64(column)
    first = str(column[0])
    if first.count("-") < 2:
        return _as_float64(column.cast(pa.float64()))
    has_offset = first.endswith("Z") or "+" in first or first.count("-") > 2
    stamps = column.cast(pa.timestamp("ns", tz="UTC" if has_offset else None))
    ns = stamps.cast(pa.int64()).to_numpy()
    seconds: NDArray[np.float64] = (ns - ns[0]) / 1e9
    return seconds


def _as_float64(column: Any) -> NDArray[np.float64]:
    return np.asarray(column.to_numpy(), dtype=np.float64)


def _spread(
    time: NDArray[np.float64], bucket_s: float, seed: int, notes: dict[str, int | float | str]
) -> NDArray[np.float64]:
    """Spread stamps that all lie at multiples of `bucket_s` over their bucket, at random times.

    Replayed as they are, they would arrive in bursts that the service never saw. Given how many requests
    a bucket has, uniform times are what a Poisson process does within it; they keep the file's order.
    """
    bucket = np.rint(time / bucket_s)
    if np.abs(time - bucket * bucket_s).max() > _BUCKET_JITTER_S:
        return time
    notes["spread_over_s"] = bucket_s
    offsets = np.random.default_rng(seed).uniform(0, bucket_s, len(time))
    spread: NDArray[np.float64] = bucket * bucket_s
    spread[np.argsort(bucket, kind="stable")] += offsets[np.lexsort((offsets, bucket))]
    return spread
