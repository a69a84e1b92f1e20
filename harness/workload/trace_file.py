"""Opens a trace file: plain or gzip, with or without a byte order mark; reads and checks its header."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import BinaryIO, cast

from harness.errors import ConfigError
from harness.workload.trace_formats import FORMATS, TraceFormat

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
    container, present = _first_columns(first)
    missing = [name for name in trace_format.columns if name not in present]
    if container != trace_format.container:
        problem = "is a JSON object, not column names" if container == "jsonl" else "is not a JSON object"
    elif missing:
        has = ", ".join(map(repr, present)) or "nothing"
        problem = f"lacks {', '.join(map(repr, missing))}; it has {has}"
    else:
        return
    raise ConfigError("workload.path", path, f"line 1 {problem}. {_advice(container, present)}")


def _first_columns(line: str) -> tuple[str, list[str]]:
    """Return the kind of file that begins with `line`, as `TraceFormat.container`, and its columns."""
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if isinstance(record, dict):
        return "jsonl", list(record)
    return "csv", next(csv.reader([line]), [])


def _advice(container: str, present: list[str]) -> str:
    fitting = [
        name
        for name, known in FORMATS.items()
        if known.container == container and set(known.columns) <= set(present)
    ]
    if not fitting:
        return "Choose the workload.format of this file, or format=csv with workload.columns"
    units = ", whose times differ in unit" if len(fitting) > 1 else ""
    return f"Its columns are those of workload.format={' or '.join(fitting)}{units}"


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
