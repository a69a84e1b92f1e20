"""Reads a recorded job: finished, still running, or cut off at any instant."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.durable import read_lines
from harness.errors import NewerRecordError
from harness.record import (
    BENCH_SERVE_FILE,
    RESULT_FIELDS,
    RESULT_FILE,
    SCHEMA_VERSION,
    STREAMS,
    RecordError,
    Stream,
)

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


def read_result(job_dir: str | Path) -> dict[str, Any]:
    """Return `result.json`. Raises RecordError if there is none, if it is damaged, or if a newer major version
    wrote it."""
    path = Path(job_dir) / RESULT_FILE
    try:
        result = _json_object(path)
    except (FileNotFoundError, NotADirectoryError):
        raise RecordError(f"{job_dir} holds no {RESULT_FILE}; give the folder of one job") from None
    _check_version(result.get("schema_version"), path)
    return dict.fromkeys(RESULT_FIELDS) | result


def is_newer(job_dir: Path) -> bool:
    """Return whether a newer version recorded the job: what it says is whole, and not ours to replace."""
    try:
        read_result(job_dir)
    except NewerRecordError:
        return True
    except RecordError:
        return False
    return False


def read_bench_serve(job_dir: str | Path) -> dict[str, Any] | None:
    """Return `bench_serve.json`, or None if the job replayed no workload."""
    path = Path(job_dir) / BENCH_SERVE_FILE
    if not path.exists():
        return None
    return _json_object(path)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise _damaged(path, error) from error
    if not isinstance(content, dict):
        raise _damaged(path, "it holds no object")
    return content


def _damaged(path: Path, reason: object) -> RecordError:
    return RecordError(f"{path} is damaged: {str(reason).splitlines()[0]}; run the job again")


def read_stream(job_dir: str | Path, name: str) -> pd.DataFrame:
    """Return a stream's rows (`capture`, `sizes`, `prefill`, `steps`, `requests`, `samples`).

    From the named file, or else from the parts that a running or dead process left. A job that did
    not get there gives no rows. Integers and booleans are nullable columns (`Int64`, `boolean`),
    floats are NaN where null. Raises RecordError for a damaged file and for a newer major version.
    """
    import pandas as pd
    import pyarrow as pa

    table = read_table(job_dir, name)
    kinds = {pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype(), pa.string(): pd.StringDtype()}
    frame: pd.DataFrame = table.to_pandas(types_mapper=kinds.get)
    return frame


def read_table(job_dir: str | Path, name: str) -> pa.Table:
    """Return a stream's rows as a pyarrow table; see `read_stream`. A column that an older version did not
    write is null."""
    folder, stream = Path(job_dir), STREAMS[name]
    path = folder / stream.file_name
    if not path.exists():
        return part_table(folder, stream)
    import pyarrow as pa

    try:
        table = _parquet_table(path) if path.suffix == ".parquet" else _csv_table(folder, path, stream)
    except pa.ArrowInvalid as error:
        raise _damaged(path, error) from error
    return _with_all_columns(table, stream)


def part_table(job_dir: Path, stream: Stream) -> pa.Table:
    """Return the whole rows of a stream's part; none if it has no part."""
    import pyarrow as pa
    import pyarrow.json

    part = stream.part(job_dir)
    header, rows = read_lines(part) if part.exists() else (None, b"")
    schema = arrow_schema(stream)
    if header is None or not rows:
        return schema.empty_table()
    _check_version(header.get("schema_version"), part)
    options = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="infer")
    try:
        return pyarrow.json.read_json(io.BytesIO(rows), parse_options=options)
    except pa.ArrowInvalid as error:
        raise RecordError(f"{part}: a row does not have the types of {stream.name}: {error}") from error


def arrow_schema(stream: Stream) -> pa.Schema:
    """Return a stream's columns as a pyarrow schema."""
    import pyarrow as pa

    kinds = {"int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_(), "string": pa.string()}
    return pa.schema([pa.field(column, kinds[kind]) for column, kind in stream.columns.items()])


def _parquet_table(path: Path) -> pa.Table:
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    metadata: Mapping[bytes, bytes] = table.schema.metadata or {}
    _check_version(metadata.get(b"schema_version", b"").decode() or None, path)
    return table


def _with_all_columns(table: pa.Table, stream: Stream) -> pa.Table:
    import pyarrow as pa

    for column in arrow_schema(stream):
        if column.name not in table.column_names:
            table = table.append_column(column, pa.nulls(len(table), column.type))
    return table


def _csv_table(folder: Path, path: Path, stream: Stream) -> pa.Table:
    """A CSV has no room for a version: `result.json` carries it."""
    import pyarrow.csv

    read_result(folder)
    types = {field.name: field.type for field in arrow_schema(stream)}
    convert = pyarrow.csv.ConvertOptions(
        column_types=types, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
    )
    parse = pyarrow.csv.ParseOptions(newlines_in_values=True)
    return pyarrow.csv.read_csv(path, parse_options=parse, convert_options=convert)


def _check_version(version: object, path: Path) -> None:
    try:
        newer = int(str(version).split(".")[0]) > int(SCHEMA_VERSION.split(".")[0])
    except ValueError:
        raise RecordError(
            f"{path} names no schema version ({version!r}); was it written by this harness?"
        ) from None
    if newer:
        raise NewerRecordError(
            f"{path} has schema version {version}, this harness reads {SCHEMA_VERSION}; "
            "upgrade it: pip install -U cudagraph-harness"
        )


def job_folders(folder: Path) -> list[Path]:
    """Return the folders of the jobs in a sweep's folder, by number or name."""
    found = [path.parent for path in folder.glob(f"*/{RESULT_FILE}")]
    return sorted(
        found,
        key=lambda path: (not path.name.isdigit(), int(path.name) if path.name.isdigit() else 0, path.name),
    )
