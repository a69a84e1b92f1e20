"""The record of a job: its schemas, its files, and the one who writes them.

`result.json` is replaced atomically, with status `running` first. Row streams are written as they go
under `parts/`, and turned into the named file when their phase ends. `record_reader` reads either.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness.durable import LineFile, Reserve, remove_if_empty, replace_file
from harness.errors import RecordError as RecordError
from harness.plain import to_plain
from harness.scrub import scrub

#: Readers refuse a newer major version; a new column or field raises the minor one.
SCHEMA_VERSION = "1.1"


class Status(StrEnum):
    """How a job ended, or that it has not."""

    RUNNING = "running"
    OK = "ok"
    FAILED = "failed"
    INVALID_CONFIG = "invalid_config"
    CAPTURE_OOM = "capture_oom"
    PARITY_FAILED = "parity_failed"
    TIMEOUT = "timeout"
    KILLED = "killed"
    INTERRUPTED = "interrupted"
    SKIPPED = "skipped"


#: The fields of `result.json`. All are there from the start; null until their phase has written them.
RESULT_FIELDS = (
    "schema_version", "status", "error", "started_at", "ended_at", "config", "config_hash", "environment",
    "model", "memory", "attention", "capture", "parity", "size_sweep", "workload", "profile", "summary", "graph_backend", "timings",
    "wandb", "resumed_from", "warnings",
)  # fmt: skip

#: Per stream: column → type (`int64`, `float64`, `bool`, `string`). Any value may be null.
CAPTURE_COLUMNS = {
    "capture_size": "int64",
    "graph_backend": "string",
    "compiled": "bool",
    "compile_s": "float64",
    "warmup_s": "float64",
    "capture_s": "float64",
    "pool_bytes": "int64",
    "torch_bytes": "int64",
    "device_bytes": "int64",
    "pinned_bytes": "int64",
    "num_nodes": "int64",
}
SIZES_COLUMNS = {
    "batch_size": "int64",
    "padded_batch_size": "int64",
    "mode": "string",
    "graph_backend": "string",
    "compiled": "bool",
    "context_len": "int64",
    "num_kv_tokens": "int64",
    "num_samples": "int64",
    "num_discarded": "int64",
    "host_prepare_us_p50": "float64",
    "replay_ms_p50": "float64",
    "step_ms_p50": "float64",
    "step_ms_p99": "float64",
    "rel_std": "float64",
    "rel_iqr": "float64",
    "roofline_fraction": "float64",
    "unmet_condition": "string",
    "roofline_ms": "float64",
    "back_to_back_ms": "float64",
    "overlap": "bool",
    "host_exposed_us_p50": "float64",
    "flush_cache": "bool",
    "round_std": "float64",
    "sm_clock_mhz": "float64",
    "mem_clock_mhz": "float64",
    "power_w": "float64",
    "temperature_c": "float64",
    "throttle_reasons": "string",
    "energy_mj_per_token": "float64",
    "num_other_processes": "int64",
    "replay_rel_std": "float64",
    "replay_round_std": "float64",
}
#: A decode step whose requests are not alike: one has `longest_len` tokens and stands at `place` (`first`,
#: `last`), the others have `context_len`. `padded`: all have `longest_len`, on a graph larger than the batch.
RAGGED_COLUMNS = {
    "batch_size": "int64",
    "padded_batch_size": "int64",
    "mode": "string",
    "graph_backend": "string",
    "place": "string",
    "context_len": "int64",
    "longest_len": "int64",
    "num_kv_tokens": "int64",
    "num_samples": "int64",
    "replay_ms_p50": "float64",
    "step_ms_p50": "float64",
    "rel_std": "float64",
}
#: Steps in the scheduler's loop, by what they are and what they follow. `pace_ms` runs from launch to launch,
#: the scheduler's work included; `host_ms` is what of it the device's work does not take.
LOOP_COLUMNS = {
    "moment": "string",
    "phase": "string",
    "previous": "string",
    "mode": "string",
    "graph_backend": "string",
    "batch_size": "int64",
    "padded_batch_size": "int64",
    "num_tokens": "int64",
    "num_cached_tokens": "int64",
    "num_samples": "int64",
    "pace_ms_p50": "float64",
    "pace_ms_mean": "float64",
    "host_ms_p50": "float64",
    "host_ms_mean": "float64",
    "host_prepare_us_p50": "float64",
}
PREFILL_COLUMNS = {
    "num_tokens": "int64",
    "context_len": "int64",
    "step_ms_p50": "float64",
    "num_samples": "int64",
    "graph_backend": "string",
}
STEPS_SCHEMA = {
    "step": "int64",
    "clock_ms": "float64",
    "phase": "string",
    "mode": "string",
    "reason": "string",
    "batch_size": "int64",
    "padded_batch_size": "int64",
    "num_graphs": "int64",
    "num_tokens": "int64",
    "num_kv_tokens": "int64",
    "host_prepare_us": "float64",
    "host_exposed_us": "float64",
    "replay_ms": "float64",
    "step_ms": "float64",
    "throttled": "bool",
    "graph_backend": "string",
    # Tokens of the longest request of the step.
    "longest_len": "int64",
}
REQUESTS_SCHEMA = {
    "request_id": "int64",
    "arrival_s": "float64",
    "sent_s": "float64",
    "prompt_len": "int64",
    "output_len": "int64",
    "ttft_ms": "float64",
    "tpot_ms": "float64",
    "e2el_ms": "float64",
    "num_preemptions": "int64",
    "status": "string",
}
SAMPLES_SCHEMA = {
    "batch_size": "int64",
    "padded_batch_size": "int64",
    "mode": "string",
    "graph_backend": "string",
    "context_len": "int64",
    "timing": "string",
    "sample": "int64",
    "host_prepare_us": "float64",
    "replay_ms": "float64",
    "step_ms": "float64",
    "host_exposed_us": "float64",
    "round": "int64",
    "preempted": "bool",
}


PROFILE_COLUMNS = {
    "batch_size": "int64",
    "mode": "string",
    "graph_backend": "string",
    "kind": "string",
    "in_graph": "bool",
    "name": "string",
    "num_calls": "float64",
    "time_us": "float64",
    "share": "float64",
}


@dataclass(frozen=True)
class Stream:
    """Rows of one kind: their columns, and the file that they end up in."""

    name: str
    file_name: str
    columns: Mapping[str, str]

    def part(self, job_dir: Path) -> Path:
        """The file of the rows while their phase runs."""
        return job_dir / PARTS_DIR / f"{self.name}.jsonl"


PARTS_DIR = "parts"
RESULT_FILE = "result.json"
BENCH_SERVE_FILE = "bench_serve.json"
REPORT_FILE = "report.html"
STREAMS = {
    stream.name: stream
    for stream in (
        Stream("capture", "capture.csv", CAPTURE_COLUMNS),
        Stream("sizes", "sizes.csv", SIZES_COLUMNS),
        Stream("prefill", "prefill.csv", PREFILL_COLUMNS),
        Stream("ragged", "ragged.csv", RAGGED_COLUMNS),
        Stream("loop", "loop.csv", LOOP_COLUMNS),
        Stream("profile", "profile.csv", PROFILE_COLUMNS),
        Stream("steps", "steps.parquet", STEPS_SCHEMA),
        Stream("requests", "requests.parquet", REQUESTS_SCHEMA),
        Stream("samples", "samples.parquet", SAMPLES_SCHEMA),
    )
}


class JobRecord:
    """Writes a job's folder. One writer at a time.

    `JobRecord(job_dir)` starts a new record with status `running`, and removes what an earlier job
    recorded there. `JobRecord.attach(job_dir)` continues the record of a process that is gone.
    """

    def __init__(self, job_dir: str | Path) -> None:
        self.job_dir = Path(job_dir)
        self.job_dir.mkdir(parents=True, exist_ok=True)
        self._open: dict[str, LineFile] = {}
        self._clear()
        self._write_result(_blank_result())
        self._reserve.take()

    @classmethod
    def attach(cls, job_dir: str | Path) -> Self:
        """Continue what is recorded in `job_dir`: to end it after its writer died, or to add to it."""
        record = cls.__new__(cls)
        record.job_dir = Path(job_dir)
        record._open = {}
        if not (record.job_dir / RESULT_FILE).exists():
            record.job_dir.mkdir(parents=True, exist_ok=True)
            record._write_result(_blank_result())
        return record

    def update(self, **parts: Any) -> None:
        """Replace the given fields of `result.json`, secrets removed; other fields stay."""
        unknown = parts.keys() - set(RESULT_FIELDS)
        if unknown:
            raise RecordError(f"result.json has no field {sorted(unknown)}; add it to RESULT_FIELDS")
        result = self._result() | scrub(to_plain(parts))
        if "status" in parts:
            has_ended = parts["status"] != Status.RUNNING
            result["ended_at"] = _now() if has_ended else None
            if has_ended:
                self._reserve.give_back()
        self._write_result(result)

    def warn(self, message: str) -> None:
        """Add a warning to `result.json`, once."""
        warnings = self._result()["warnings"]
        if scrub(message) not in warnings:
            self.update(warnings=[*warnings, message])

    def append(self, stream: str, row: Mapping[str, object]) -> None:
        """Write one row; when this returns, the row survives the death of the process."""
        self.append_many(stream, (row,))

    def append_many(self, stream: str, rows: Iterable[Mapping[str, object]]) -> None:
        """Write several rows at once. Columns left out are null; an unknown one raises RecordError."""
        rows = list(rows)
        columns = STREAMS[stream].columns.keys()
        for row in rows:
            if not row.keys() <= columns:
                raise RecordError(
                    f"{stream} has no column {sorted(row.keys() - columns)}; add it to record.py"
                )
        self._line_file(stream).append(rows)

    def finish(self, stream: str) -> Path:
        """Turn a stream's rows into its named file and return its path. A stream without rows gives a
        file with the columns only."""
        from harness.record_reader import part_table

        kind = STREAMS[stream]
        self._close(stream)
        path = self.job_dir / kind.file_name
        metadata = {"schema_version": SCHEMA_VERSION}
        if backend := self._result()["graph_backend"]:
            metadata["graph_backend"] = backend
        replace_file(path, _encode_table(part_table(self.job_dir, kind), path.suffix, metadata))
        kind.part(self.job_dir).unlink(missing_ok=True)
        remove_if_empty(self.job_dir / PARTS_DIR)
        return path

    def finish_all(self) -> list[Path]:
        """Finish every stream that has rows waiting, as after a crash."""
        return [self.finish(name) for name, kind in STREAMS.items() if kind.part(self.job_dir).exists()]

    def write_bench_serve(self, summary: Mapping[str, Any], graph_backend: str) -> Path:
        """Write `bench_serve.json`: the workload's summary under `vllm bench serve`'s keys, and
        `graph_backend`; the same goes into `result.json` as `summary`."""
        content = to_plain(dict(summary)) | {"graph_backend": graph_backend}
        path = self.job_dir / BENCH_SERVE_FILE
        replace_file(path, _json_bytes(content))
        self.update(summary=content, graph_backend=graph_backend)
        return path

    def close(self) -> None:
        """Close the open parts. Their rows stay where they are."""
        for stream in list(self._open):
            self._close(stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _reserve(self) -> Reserve:
        """Room that a running job keeps for its last `result.json`."""
        return Reserve(self.job_dir / PARTS_DIR / "reserve")

    def _line_file(self, stream: str) -> LineFile:
        if stream not in self._open:
            kind = STREAMS[stream]
            part = kind.part(self.job_dir)
            if part.exists() or (self.job_dir / kind.file_name).exists():
                raise RecordError(f"{stream} is already recorded in {self.job_dir}; it takes no more rows")
            self._open[stream] = LineFile(part, {"schema_version": SCHEMA_VERSION, "stream": stream})
        return self._open[stream]

    def _close(self, stream: str) -> None:
        if stream in self._open:
            self._open.pop(stream).close()

    def _clear(self) -> None:
        for kind in STREAMS.values():
            kind.part(self.job_dir).unlink(missing_ok=True)
            (self.job_dir / kind.file_name).unlink(missing_ok=True)
        (self.job_dir / BENCH_SERVE_FILE).unlink(missing_ok=True)

    def _result(self) -> dict[str, Any]:
        from harness.record_reader import read_result

        return read_result(self.job_dir)

    def _write_result(self, result: Mapping[str, Any]) -> None:
        replace_file(self.job_dir / RESULT_FILE, _json_bytes(result))


def _blank_result() -> dict[str, Any]:
    blank: dict[str, Any] = dict.fromkeys(RESULT_FIELDS)
    return blank | {
        "schema_version": SCHEMA_VERSION,
        "status": Status.RUNNING.value,
        "started_at": _now(),
        "warnings": [],
    }


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()


def _encode_table(table: Any, suffix: str, metadata: Mapping[str, str]) -> bytes:
    """Return a pyarrow table as the bytes of a CSV (null is an empty field) or Parquet file.

    Only Parquet has room for `metadata`.
    """
    import pyarrow.csv
    import pyarrow.parquet

    buffer = io.BytesIO()
    if suffix == ".parquet":
        pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), buffer)
    else:
        buffer.write((",".join(table.column_names) + "\n").encode())
        pyarrow.csv.write_csv(table, buffer, pyarrow.csv.WriteOptions(include_header=False))
    return buffer.getvalue()
