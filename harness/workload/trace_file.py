"""Opens a trace file: plain or gzip, with or without a byte order mark; reads and checks its header."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import BinaryIO, cast

from harness.errors import ConfigError
from harness.workload.trace_formats import TraceFormat

_GZIP_MAGIC = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
#: Characters of the first line that are looked at: a file without lines is not read whole.
_MAX_LINE = 1 << 24


def open_trace(path: str | Path) -> BinaryIO:
    """Open `path` for reading from its first character, unpacked if it is gzip (by content, not by name).

    Raises ConfigError for a file that is missing, empty or not readable.
    """
    try:
        with open(path, "rb") as raw:
            magic = raw.read(2)
        opener = gzip.open if magic == _GZIP_MAGIC else open
        file = cast(BinaryIO, opener(path, "rb"))
        start = file.read(len(_BOM))
    except (OSError, EOFError) as error:
        raise ConfigError("workload.path", path, f"cannot be read: {_reason(error)}") from error
    if not start:
        file.close()
        raise ConfigError("workload.path", path, "the file is empty; name a trace with requests")
    if start != _BOM:
        file.seek(0)
    return file


def open_text(path: str | Path) -> io.TextIOWrapper:
    """Open `path` as `open_trace` does, as UTF-8 text whose newlines are kept as they are."""
    return io.TextIOWrapper(open_trace(path), encoding="utf-8", errors="replace", newline="")


def check_columns(path: str | Path, trace_format: TraceFormat) -> None:
    """Raise ConfigError if the file cannot be read or its first record lacks a column; reads no further."""
    try:
        with open_text(path) as text:
            first = text.readline(_MAX_LINE)
    except (OSError, EOFError) as error:
        raise ConfigError("workload.path", path, f"cannot be read: {_reason(error)}") from error
    present = _csv_columns(first) if trace_format.container == "csv" else _json_keys(path, first)
    missing = [name for name in trace_format.columns if name not in present]
    if missing:
        raise ConfigError(
            "workload.path",
            path,
            f"line 1 lacks {', '.join(map(repr, missing))}; it has {', '.join(map(repr, present)) or 'nothing'}."
            " Choose the workload.format of this file, or format=csv with workload.columns",
        )


def _csv_columns(line: str) -> list[str]:
    return next(csv.reader([line]), [])


def _json_keys(path: str | Path, line: str) -> list[str]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            "workload.path", path, f"line 1 is not a JSON object: {error}. Is workload.format right?"
        ) from error
    return list(record) if isinstance(record, dict) else []


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
