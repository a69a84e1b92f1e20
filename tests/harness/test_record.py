"""The record survives its writer, refuses what it cannot read, and keeps no secret."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.__main__ import main
from harness.durable import replace_file
from harness.plain import to_plain
from harness.record import RESULT_FIELDS, SCHEMA_VERSION, STREAMS, JobRecord, RecordError, Status
from harness.record_reader import arrow_schema, read_bench_serve, read_result, read_stream, read_table
from tests.harness.job_folder import BENCH_SERVE, CONFIG, step_row, write_job
from tests.harness.small_disk import small_disk

ROOT = Path(__file__).parents[2]

#: Writes every stream, finishes some on the way, and says after each call how many rows are down.
WRITER = """
import sys
from harness.record import JobRecord
record = JobRecord(sys.argv[1])
keys = {"capture": "capture_size", "requests": "request_id", "steps": "step", "samples": "sample"}
for stream, key in keys.items():
    for first in range(0, 400, 4):
        record.append(stream, {key: first})
        record.append_many(stream, [{key: first + i} for i in (1, 2, 3)])
        sys.stdout.write(f"{stream} {first + 4}\\n")
        sys.stdout.flush()
    if stream in ("capture", "requests"):
        record.finish(stream)
    record.update(size_sweep={"after": stream})
"""
KEYS = {"capture": "capture_size", "requests": "request_id", "steps": "step", "samples": "sample"}


def run_python(code: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload,no-any-return]


def killed_writer(job_dir: Path, num_bytes: int) -> dict[str, int]:
    """Kill a writer once it has reported `num_bytes`; returns the rows that it said were down."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(job_dir)], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    reported = process.stdout.read(num_bytes)
    process.kill()
    reported += process.stdout.read()
    process.stdout.close()
    process.wait()
    whole = reported.decode().rpartition("\n")[0]
    return {line.split()[0]: int(line.split()[1]) for line in whole.splitlines()}


@pytest.mark.parametrize("instant", range(20))
def test_a_kill_at_a_random_instant_leaves_every_finished_row_readable(tmp_path: Path, instant: int) -> None:
    generator = random.Random(instant)
    reported = killed_writer(tmp_path, num_bytes=generator.randrange(1, 4800))
    assert read_result(tmp_path)["status"] == "running"
    for stream, key in KEYS.items():
        values = read_table(tmp_path, stream).column(key).to_pylist()
        assert values == list(range(len(values)))
        assert len(values) >= reported.get(stream, 0)


def test_a_part_cut_at_any_byte_gives_its_whole_rows(tmp_path: Path) -> None:
    record = JobRecord(tmp_path)
    for step in range(3):
        record.append("steps", {"step": step})
    part = STREAMS["steps"].part(tmp_path)
    content = part.read_bytes()
    for length in range(len(content) + 1):
        part.write_bytes(content[:length])
        num_lines = content[:length].count(b"\n")
        assert read_table(tmp_path, "steps").num_rows == max(0, num_lines - 1)


def test_a_full_disk_raises_and_leaves_no_torn_row_behind(tmp_path: Path) -> None:
    code = """
import resource, sys
from harness.record import JobRecord
record = JobRecord(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
written = 0
try:
    while True:
        record.append("steps", {"step": written, "mode": "graph"})
        written += 1
except OSError:
    print(written)
"""
    done = run_python(code, str(tmp_path))
    assert done.stderr == ""
    assert read_table(tmp_path, "steps").num_rows == int(done.stdout)
    assert STREAMS["steps"].part(tmp_path).read_bytes().endswith(b"\n")


def test_a_new_record_says_running_and_everything_else_is_null(tmp_path: Path) -> None:
    JobRecord(tmp_path / "new" / "job")
    result = read_result(tmp_path / "new" / "job")
    assert tuple(result) == RESULT_FIELDS
    assert (result["status"], result["schema_version"], result["warnings"]) == ("running", SCHEMA_VERSION, [])
    written = {"status", "schema_version", "started_at", "warnings"}
    assert all(result[field] is None for field in RESULT_FIELDS if field not in written)


def test_a_new_record_removes_what_an_earlier_job_left(tmp_path: Path) -> None:
    write_job(tmp_path)
    JobRecord(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["result.json"]
    assert read_table(tmp_path, "steps").num_rows == 0


def test_attaching_ends_the_record_of_a_dead_process(tmp_path: Path) -> None:
    write_job(tmp_path, finish=False)
    record = JobRecord.attach(tmp_path)
    record.update(status=Status.KILLED, error={"kind": "SIGKILL", "message": "", "traceback": None})
    assert {path.name for path in record.finish_all()} == {stream.file_name for stream in STREAMS.values()}
    assert not (tmp_path / "parts").exists()
    result = read_result(tmp_path)
    assert (result["status"], result["error"]["kind"], result["config"]) == ("killed", "SIGKILL", CONFIG)
    assert result["ended_at"] is not None


def test_readers_see_the_old_result_or_the_new_one_never_a_part(tmp_path: Path) -> None:
    record = JobRecord(tmp_path)
    ended = threading.Event()
    seen: list[object] = []

    def read() -> None:
        while not ended.is_set():
            seen.append(read_result(tmp_path)["model"])

    reader = threading.Thread(target=read)
    reader.start()
    for index in range(100):
        record.update(model={"index": index, "text": "x" * 20_000})
    ended.set()
    reader.join()
    assert seen and all(model is None or len(model["text"]) == 20_000 for model in seen)  # type: ignore[index]


def test_a_result_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    replace_file(path, b"old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, b"new")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("result.json", b"old")]


def test_every_stream_reads_the_same_from_its_parts_and_from_its_file(tmp_path: Path) -> None:
    write_job(tmp_path / "parts", finish=False)
    write_job(tmp_path / "files", finish=True)
    for name, stream in STREAMS.items():
        assert (tmp_path / "files" / stream.file_name).exists()
        from_parts, from_file = read_table(tmp_path / "parts", name), read_table(tmp_path / "files", name)
        assert from_parts.num_rows > 0
        assert from_parts.schema.remove_metadata() == arrow_schema(stream)
        assert from_parts.to_pylist() == from_file.to_pylist()


nullable_rows = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "batch_size": st.none() | st.integers(-(2**60), 2**60),
            "mode": st.none() | st.text(),
            "compiled": st.none() | st.booleans(),
            "rel_std": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        },
    ),
    max_size=5,
)


@given(rows=nullable_rows)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_row_comes_back_as_it_was_written(tmp_path: Path, rows: list[dict[str, object]]) -> None:
    record = JobRecord(tmp_path)
    record.append_many("sizes", rows)
    parts = read_table(tmp_path, "sizes").to_pylist()
    record.finish("sizes")
    expected = [dict.fromkeys(STREAMS["sizes"].columns) | row for row in rows]
    assert parts == expected
    assert read_table(tmp_path, "sizes").to_pylist() == expected


def test_what_was_not_measured_is_null_and_never_zero(tmp_path: Path) -> None:
    record = JobRecord(tmp_path)
    record.append("sizes", {"batch_size": 4, "replay_ms_p50": float("nan"), "rel_std": float("inf")})
    path = record.finish("sizes")
    columns, values = (line.split(",") for line in path.read_text().splitlines())
    assert {name: value for name, value in zip(columns, values, strict=True) if value} == {"batch_size": "4"}
    frame = read_stream(tmp_path, "sizes")
    assert frame["replay_ms_p50"].isna().all() and frame["num_samples"].isna().all()


def test_a_finished_stream_without_rows_has_its_columns(tmp_path: Path) -> None:
    record = JobRecord(tmp_path)
    assert (
        record.finish("prefill").read_text()
        == "num_tokens,context_len,step_ms_p50,num_samples,graph_backend\n"
    )
    assert list(read_stream(tmp_path, "prefill").columns) == list(STREAMS["prefill"].columns)


def test_an_unknown_column_or_field_is_refused_by_name(tmp_path: Path) -> None:
    record = JobRecord(tmp_path)
    with pytest.raises(RecordError, match="steps has no column .*'batchsize'"):
        record.append("steps", {"step": 1, "batchsize": 2})
    with pytest.raises(RecordError, match="no field .*'statsu'"):
        record.update(statsu="ok")
    assert read_table(tmp_path, "steps").num_rows == 0


def test_a_finished_stream_takes_no_more_rows(tmp_path: Path) -> None:
    record = JobRecord(tmp_path)
    record.append("steps", step_row(0))
    record.finish("steps")
    with pytest.raises(RecordError, match="already recorded"):
        record.append("steps", step_row(1))


def test_warnings_are_kept_once(tmp_path: Path) -> None:
    record = JobRecord(tmp_path)
    for message in ("batch 9 is above 8", "slow clock", "batch 9 is above 8"):
        record.warn(message)
    assert read_result(tmp_path)["warnings"] == ["batch 9 is above 8", "slow clock"]


def test_bench_serve_holds_the_summary_and_the_graph_backend(tmp_path: Path) -> None:
    JobRecord(tmp_path).write_bench_serve(BENCH_SERVE, "emulated")
    expected = BENCH_SERVE | {"graph_backend": "emulated"}
    assert read_bench_serve(tmp_path) == expected == read_result(tmp_path)["summary"]


class TestSchemaVersion:
    def test_stands_in_every_file(self, tmp_path: Path) -> None:
        write_job(tmp_path)
        assert read_result(tmp_path)["schema_version"] == SCHEMA_VERSION
        for path in tmp_path.glob("*.parquet"):
            metadata = pyarrow.parquet.read_schema(path).metadata
            assert metadata[b"schema_version"].decode() == SCHEMA_VERSION

    def test_a_newer_major_version_is_refused_in_result_json_and_its_csvs(self, tmp_path: Path) -> None:
        write_job(tmp_path)
        path = tmp_path / "result.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": "2.0"}))
        for read in (lambda: read_result(tmp_path), lambda: read_table(tmp_path, "sizes")):
            with pytest.raises(RecordError, match=r"schema version 2\.0, this harness reads 1\.1; upgrade"):
                read()

    def test_a_newer_major_version_is_refused_in_parquet_and_parts(self, tmp_path: Path) -> None:
        write_job(tmp_path)
        newer = pa.table({"step": [1]}).replace_schema_metadata({"schema_version": "2.1"})
        pyarrow.parquet.write_table(newer, tmp_path / "steps.parquet")
        with pytest.raises(RecordError, match="schema version 2.1"):
            read_stream(tmp_path, "steps")
        (tmp_path / "steps.parquet").unlink()
        part = STREAMS["steps"].part(tmp_path)
        part.parent.mkdir()
        part.write_text('{"schema_version":"3.0"}\n{"step":1}\n')
        with pytest.raises(RecordError, match="schema version 3.0"):
            read_stream(tmp_path, "steps")

    def test_a_newer_minor_version_is_read_with_its_new_columns(self, tmp_path: Path) -> None:
        write_job(tmp_path, finish=False)
        STREAMS["steps"].part(tmp_path).write_text('{"schema_version":"1.9"}\n{"step":7,"new":"x"}\n')
        (row,) = read_table(tmp_path, "steps").to_pylist()
        assert (row["step"], row["new"], row["mode"]) == (7, "x", None)


def test_a_record_holds_no_object_that_json_has_no_word_for() -> None:
    assert to_plain({"a": (1, Path("x"), Status.OK, float("nan"))}) == {"a": [1, "x", "ok", None]}
    with pytest.raises(TypeError, match="cannot hold a object"):
        to_plain({"a": object()})


def test_a_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="holds no result.json"):
        read_result(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "\x00\xff"])
def test_a_damaged_result_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(RecordError, match=r"result\.json is damaged"):
        read_result(tmp_path)


@pytest.mark.parametrize("name", ["steps", "sizes"])
def test_a_damaged_table_is_refused_by_name(tmp_path: Path, name: str) -> None:
    write_job(tmp_path)
    path = tmp_path / STREAMS[name].file_name
    path.write_text("no,such\nthing\n")
    with pytest.raises(RecordError, match=rf"{path.name} is damaged"):
        read_table(tmp_path, name)


def test_a_verb_says_what_is_damaged_and_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(tmp_path)
    (tmp_path / "steps.parquet").write_bytes(b"PAR1")
    for verb in (["report", str(tmp_path)], ["plan", "--verify", str(tmp_path)]):
        assert main(verb) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_a_full_disk_takes_the_last_word_about_a_job(tmp_path: Path) -> None:
    """The disk is filled by another while the job runs."""
    disk = tmp_path / "disk"
    code = """
import contextlib, sys
from harness.record import JobRecord, Status
from harness.record_reader import read_result
record = JobRecord(sys.argv[1] + "/job")
with contextlib.suppress(OSError), open(sys.argv[1] + "/other", "wb", buffering=0) as other:
    while other.write(bytes(512)):
        pass
try:
    record.append_many("samples", [{"batch_size": 1, "sample": i} for i in range(10_000)])
except OSError as error:
    record.update(status=Status.FAILED, error={"message": str(error), "traceback": "x" * 20_000})
result = read_result(sys.argv[1] + "/job")
print(result["status"], result["error"]["message"])
"""
    command = [*small_disk(disk, 1), sys.executable, "-c", code, str(disk)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "failed" in done.stdout and "Errno 28" in done.stdout, done.stderr


def test_recording_and_reading_load_no_heavy_library() -> None:
    code = """
import sys
import harness.record, harness.record_reader, harness.tracking, harness.progress, harness.summary, harness.config_hash
print([name for name in ("torch", "wandb", "pandas", "pyarrow", "numpy", "rich") if name in sys.modules])
"""
    assert run_python(code).stdout.strip() == "[]"


def test_what_an_older_version_did_not_write_is_null(tmp_path: Path) -> None:
    """Records of minor versions before lack columns and fields: they are read with nulls."""
    write_job(tmp_path)
    path = tmp_path / "sizes.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line.rsplit(",", 1)[0] for line in lines) + "\n")
    result = json.loads((tmp_path / "result.json").read_text())
    del result["profile"]
    (tmp_path / "result.json").write_text(json.dumps(result))
    table = read_table(tmp_path, "sizes")
    assert set(table.column_names) == set(STREAMS["sizes"].columns)
    assert table[list(STREAMS["sizes"].columns)[-1]].null_count == len(table)
    assert read_result(tmp_path)["profile"] is None
