"""Finds the line of a trace that cannot be used. Slow and exact: it runs only once something is wrong."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

from harness.errors import ConfigError
from harness.workload.trace_file import open_text
from harness.workload.trace_formats import TraceFormat

#: Largest length that is taken for a number of tokens (the arrays are int32).
MAX_TOKENS = 2**31 - 1


def refuse(path: str | Path, trace_format: TraceFormat, fallback: str) -> ConfigError:
    """Return the error for the first line that is wrong, or for `fallback` if every line reads well."""
    line = 0
    try:
        for line, record in _records(path, trace_format):
            reason = record if isinstance(record, str) else _fault(record, trace_format)
            if reason:
                return ConfigError(
                    "workload.path", path, f"line {line}: {reason}. Correct or remove the line"
                )
    except (OSError, EOFError) as error:
        fallback = str(error)
    else:
        if not line:
            return no_requests(path)
    return ConfigError("workload.path", path, f"cannot be read as {trace_format.container}: {fallback}")


def no_requests(path: str | Path) -> ConfigError:
    return ConfigError("workload.path", path, "has no requests; name a trace with at least one")


def _records(path: str | Path, trace_format: TraceFormat) -> Iterator[tuple[int, Mapping[str, object] | str]]:
    """Yield line number and record of each request, or the reason why the line is none."""
    with open_text(path) as text:
        if trace_format.container == "jsonl":
            for number, line in enumerate(text, start=1):
                if line.strip():
                    yield number, _json_record(line)
            return
        reader = csv.reader(text)
        header = next(reader)
        for row in reader:
            if row and len(row) != len(header):
                yield reader.line_num, f"{len(row)} fields where the header has {len(header)}"
            elif row:
                yield reader.line_num, dict(zip(header, row, strict=True))


def _json_record(line: str) -> Mapping[str, object] | str:
    try:
        record = json.loads(line)
    except ValueError as error:
        return f"not a JSON object: {error}"
    return record if isinstance(record, dict) else "not a JSON object"


def _fault(record: Mapping[str, object], trace_format: TraceFormat) -> str | None:
    time_fault = _time_fault(trace_format.timestamp, record.get(trace_format.timestamp))
    lengths = (trace_format.prompt_len, trace_format.output_len)
    return time_fault or next(
        (fault for name in lengths if (fault := _length_fault(name, record.get(name)))), None
    )


def _length_fault(name: str, value: object) -> str | None:
    try:
        number = int(value) if isinstance(value, int | str) else None
    except ValueError:
        number = None
    if number is None or isinstance(value, bool):
        return f"{name} is {value!r}, not a whole number of tokens"
    if number < 0:
        return f"{name} is {number}, and a length cannot be negative"
    return f"{name} is {number}, more than {MAX_TOKENS} tokens" if number > MAX_TOKENS else None


def _time_fault(name: str, value: object) -> str | None:
    if isinstance(value, str) and value.count("-") > 1:  # a date: a number has two at most, as in -1e-3
        try:
            datetime.fromisoformat(value.strip())
            return None
        except ValueError:
            pass
    try:
        finite = math.isfinite(float(value)) if isinstance(value, int | float | str) else False
    except ValueError:
        finite = False
    return None if finite else f"{name} is {value!r}, not a time"
