"""Reads a trace in parts, so that days of traffic need no more memory than a minute of it.

What needs the whole trace at once is refused: sorting it, and scaling it to a mean rate.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.errors import ConfigError
from harness.workload.base import Workload
from harness.workload.shaping import Shaping, shape
from harness.workload.trace_diagnosis import refuse
from harness.workload.trace_file import check_columns, open_trace
from harness.workload.trace_formats import TraceFormat, trace_format

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOCK_BYTES = 16 << 20


def stream_trace(
    path: str | Path,
    format_name: str,
    shaping: Shaping,
    columns: Mapping[str, str | None] | None = None,
    seed: int = 0,
) -> Iterator[Workload]:
    """Yield the requests of the trace at `path` as consecutive workloads of one time line.

    As `load_trace` would give them, but for the spread of bucketed stamps, which is drawn block by
    block. Raises ConfigError, possibly after some parts, for a line that cannot be used, for stamps
    that are not in order, and for `shaping.request_rate`.
    """
    if shaping.request_rate is not None:
        raise ConfigError("--request-rate", shaping.request_rate, "needs the whole trace: write --rate-scale")
    layout = trace_format(format_name, columns)
    check_columns(path, layout)
    rng, parts = np.random.default_rng(seed), _Parts(path, shaping)
    rest: tuple[NDArray[Any], ...] = tuple(np.zeros(0) for _ in range(3))
    for table in _tables(path, layout):
        block = _columns(path, layout, table)
        joined = tuple(np.concatenate([old, new]) for old, new in zip(rest, block, strict=True))
        if layout.bucket_s is None:
            yield from parts.take(*joined)
            continue
        # The last bucket may go on in the next block.
        bucket = np.rint(joined[0] / layout.bucket_s)
        ends = int(np.searchsorted(bucket, bucket[-1])) if len(bucket) else 0
        rest = tuple(column[ends:] for column in joined)
        yield from parts.take(_spread(bucket[:ends], layout.bucket_s, rng), *(c[:ends] for c in joined[1:]))
    if layout.bucket_s is not None:
        bucket = np.rint(rest[0] / layout.bucket_s)
        yield from parts.take(_spread(bucket, layout.bucket_s, rng), *rest[1:])


class _Parts:
    """Shapes one block after another on a common time line."""

    def __init__(self, path: str | Path, shaping: Shaping) -> None:
        self._path, self._shaping = path, shaping
        self._start_s: float | None = None
        self._last_s = -np.inf
        self._num_taken = 0

    def take(
        self, time_s: NDArray[np.float64], prompt_len: NDArray[Any], output_len: NDArray[Any]
    ) -> Iterator[Workload]:
        shaping = self._shaping
        if not len(time_s):
            return
        if time_s[0] < self._last_s or (np.diff(time_s) < 0).any():
            raise ConfigError(
                "--stream", self._path, "its stamps are not in order: sort it, or leave --stream out"
            )
        self._last_s = float(time_s[-1])
        usable = (prompt_len > 0) & (output_len > 0)
        if shaping.over_length == "skip" and shaping.max_seq_len is not None:
            usable &= prompt_len + output_len <= shaping.max_seq_len
        if not usable.any():
            return
        if self._start_s is None:
            self._start_s = float(time_s[usable][0])
        arrival_s = (time_s[usable] - self._start_s) / shaping.rate_scale
        keep = (
            len(arrival_s)
            if shaping.duration_s is None
            else int(np.searchsorted(arrival_s, shaping.duration_s))
        )
        if shaping.max_requests is not None:
            keep = min(keep, shaping.max_requests - self._num_taken)
        if keep <= 0:
            return
        self._num_taken += keep
        prompt_len, output_len = (
            column[usable][:keep].astype(np.int64) for column in (prompt_len, output_len)
        )
        part = shape(
            arrival_s[:keep], prompt_len, output_len, Shaping(shaping.max_seq_len, shaping.over_length)
        )
        yield replace(part, arrival_s=arrival_s[:keep], max_concurrency=shaping.max_concurrency)


def _spread(bucket: NDArray[np.float64], bucket_s: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Uniform times within each bucket, in order."""
    return np.sort(bucket * bucket_s + rng.uniform(0, bucket_s, len(bucket)))


def _tables(path: str | Path, layout: TraceFormat) -> Iterator[Any]:
    """Yield Arrow tables of a bounded number of rows."""
    import pyarrow as pa
    from pyarrow import csv, json

    first = pa.string() if layout.container == "csv" else pa.float64()
    types = dict(zip(layout.columns, [first, pa.int64(), pa.int64()], strict=True))
    try:
        with open_trace(path) as file:
            if layout.container == "csv":
                convert = csv.ConvertOptions(include_columns=list(types), column_types=types)
                yield from csv.open_csv(
                    file, csv.ReadOptions(block_size=_BLOCK_BYTES), convert_options=convert
                )
                return
            parse = json.ParseOptions(
                explicit_schema=pa.schema(list(types.items())), unexpected_field_behavior="ignore"
            )
            for block in _whole_lines(file):
                yield json.read_json(io.BytesIO(block), json.ReadOptions(block_size=len(block) + 1), parse)
    except (pa.ArrowException, OSError, EOFError) as error:
        raise refuse(path, layout, str(error)) from error


def _whole_lines(file: Any) -> Iterator[bytes]:
    rest = b""
    while block := file.read(_BLOCK_BYTES):
        end = block.rfind(b"\n") + 1
        if end:
            yield rest + block[:end]
            rest = block[end:]
        else:
            rest += block
    if rest.strip():
        yield rest


def _columns(path: str | Path, layout: TraceFormat, table: Any) -> tuple[NDArray[Any], ...]:
    if any(table[name].null_count for name in layout.columns):
        raise refuse(path, layout, "a value is missing")
    time, prompt_len, output_len = (table[name] for name in layout.columns)
    seconds = _seconds(time) / (1e3 if layout.unit == "ms" else 1.0)
    return seconds, _as_array(prompt_len), _as_array(output_len)


def _as_array(column: Any) -> NDArray[Any]:
    """A chunked column or an array as numpy."""
    import pyarrow as pa

    is_chunked = isinstance(column, pa.ChunkedArray)
    return np.asarray(column.to_numpy() if is_chunked else column.to_numpy(zero_copy_only=False))


def _seconds(column: Any) -> NDArray[np.float64]:
    """Numbers keep their unit; dates become seconds since 1970."""
    import pyarrow as pa

    if not pa.types.is_string(column.type):
        return _as_array(column).astype(np.float64)
    first = str(column[0]) if len(column) else ""
    if first.count("-") < 2:
        return _as_array(column.cast(pa.float64())).astype(np.float64)
    has_offset = first.endswith("Z") or "+" in first or first.count("-") > 2
    stamps = column.cast(pa.timestamp("ns", tz="UTC" if has_offset else None))
    return _as_array(stamps.cast(pa.int64())).astype(np.float64) / 1e9
