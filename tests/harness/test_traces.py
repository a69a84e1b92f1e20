from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.errors import ConfigError
from harness.workload.base import Workload
from harness.workload.shaping import Shaping
from harness.workload.traces import check_trace, load_trace

TRACES = Path(os.environ.get("CGH_TRACES", Path(__file__).parents[3] / "shared" / "traces"))
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def real_trace(name: str) -> Path:
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"no {path}: set CGH_TRACES to the folder of the public traces")
    return path


def load_text(tmp_path: Path, text: str | bytes, format_name: str = "azure", **kwargs: object) -> Workload:
    path = tmp_path / "trace"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_trace(path, format_name, kwargs.pop("shaping", Shaping()), **kwargs)


def azure(*rows: str) -> str:
    return AZURE + "".join(f"{row}\n" for row in rows)


TWO_ROWS = azure("2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,109")


def lengths(workload: Workload) -> list[tuple[int, int]]:
    return list(zip(workload.prompt_len.tolist(), workload.output_len.tolist(), strict=True))


@pytest.mark.parametrize(
    ("name", "format_name", "num_requests", "duration_s", "rate", "prompt", "output", "cv"),
    [
        ("AzureLLMInferenceTrace_conv.csv", "azure", 19366, 3501.7, 5.53, 1155, 211, 1.09),
        ("AzureLLMInferenceTrace_code.csv", "azure", 8819, 3435.9, 2.57, 2048, 28, 13.15),
        ("mooncake_conversation_trace.jsonl", "mooncake", 12031, 3537.0, 3.40, 12035, 343, None),
    ],
)
def test_public_traces_have_their_published_statistics(
    name: str,
    format_name: str,
    num_requests: int,
    duration_s: float,
    rate: float,
    prompt: int,
    output: int,
    cv: float | None,
) -> None:
    statistics = load_trace(real_trace(name), format_name, Shaping()).statistics()
    assert statistics.num_requests == num_requests
    assert statistics.duration_s == pytest.approx(duration_s, abs=3.0 if cv is None else 0.06)
    assert statistics.request_rate == pytest.approx(rate, abs=0.01)
    assert round(statistics.prompt_len.mean) == prompt
    assert round(statistics.output_len.mean) == output
    if cv is not None:
        assert statistics.inter_arrival_cv == pytest.approx(cv, abs=0.005)


def test_buckets_of_mooncake_are_spread_in_order_within_their_three_seconds() -> None:
    path = real_trace("mooncake_conversation_trace.jsonl")
    workload = load_trace(path, "mooncake", Shaping(max_requests=2000))
    with path.open() as file:
        stamps = np.array([json.loads(next(file))["timestamp"] for _ in range(2000)]) / 1e3
    assert workload.notes["spread_over_s"] == 3.0
    assert "ignored" in str(workload.notes["hash_ids"])
    assert workload.prompt_len[0] == 6758, "the file's order is kept"
    first_s = workload.arrival_s - workload.arrival_s[0]
    assert np.all(np.abs(first_s - stamps) <= 3.01)
    assert workload.statistics().inter_arrival_cv == pytest.approx(1.0, abs=0.25)


def test_stamps_keep_seven_fractional_digits(tmp_path: Path) -> None:
    workload = load_text(tmp_path, TWO_ROWS)
    assert workload.arrival_s.tolist() == pytest.approx([0.0, 4.314579], abs=1e-9)
    assert lengths(workload) == [(374, 44), (396, 109)]


def test_stamps_of_2024_carry_an_offset(tmp_path: Path) -> None:
    text = azure("2024-05-10 00:00:00.009930+00:00,1,2", "2024-05-10 00:00:01.509930+00:00,3,4")
    assert load_text(tmp_path, text).arrival_s.tolist() == pytest.approx([0.0, 1.5])


@pytest.mark.parametrize(
    "text",
    [
        TWO_ROWS.rstrip("\n"),
        TWO_ROWS.replace("\n", "\r\n"),
        "\ufeff" + TWO_ROWS,
        TWO_ROWS.replace("\n", "\n\n"),
        gzip.compress(TWO_ROWS.encode(), mtime=0),
        gzip.compress(("\ufeff" + TWO_ROWS).encode(), mtime=0),
    ],
    ids=["no newline at the end", "CRLF", "BOM", "blank lines", "gzip", "gzip with BOM"],
)
def test_the_same_rows_however_the_file_is_written(tmp_path: Path, text: str | bytes) -> None:
    workload = load_text(tmp_path, text)
    assert lengths(workload) == [(374, 44), (396, 109)]
    assert workload.arrival_s[1] == pytest.approx(4.314579)


BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
COLUMNS = {"arrival_s": "t", "prompt_len": "in", "output_len": "out"}
#: Two requests, 374 and 44 tokens, and 396 and 109, in each format.
IN_EACH_FORMAT = {
    "azure": TWO_ROWS,
    "burstgpt": BURSTGPT + "5,GPT-4,374,44,418,API log\n9.5,GPT-4,396,109,505,API log\n",
    "csv": "t,in,out\n0.0,374,44\n4.5,396,109\n",
} | dict.fromkeys(
    ("mooncake", "qwen_bailian", "timed_trace"),
    '{"timestamp": 1, "input_length": 374, "output_length": 44, "hash_ids": [1]}\n'
    '{"timestamp": 4501, "input_length": 396, "output_length": 109, "hash_ids": [1]}\n',
)


@pytest.mark.parametrize("format_name", IN_EACH_FORMAT)
def test_every_format_is_read_however_the_file_is_written(tmp_path: Path, format_name: str) -> None:
    text = IN_EACH_FORMAT[format_name]
    ways = (text, text.rstrip("\n"), text.replace("\n", "\r\n"), "\ufeff" + text)
    for content in (*map(str.encode, ways), *(gzip.compress(way.encode()) for way in ways)):
        workload = load_text(tmp_path, content, format_name, columns=COLUMNS)
        assert lengths(workload) == [(374, 44), (396, 109)]
        assert workload.arrival_s[0] == 0.0 < workload.arrival_s[1]


@pytest.mark.parametrize("format_name", IN_EACH_FORMAT)
def test_every_format_names_the_line_of_a_negative_length(tmp_path: Path, format_name: str) -> None:
    text = IN_EACH_FORMAT[format_name].replace("396", "-396")
    line = len(text.splitlines())
    with pytest.raises(ConfigError, match=f"line {line}: .* is -396, and a length cannot be negative"):
        load_text(tmp_path, text, format_name, columns=COLUMNS)


@pytest.mark.parametrize("format_name", IN_EACH_FORMAT)
def test_every_format_leaves_out_requests_without_an_output_and_counts_them(
    tmp_path: Path, format_name: str
) -> None:
    text = IN_EACH_FORMAT[format_name].replace("109", "0").replace("505", "396")
    workload = load_text(tmp_path, text, format_name, columns=COLUMNS)
    assert lengths(workload) == [(374, 44)]
    assert workload.notes["num_without_tokens"] == 1


@pytest.mark.parametrize(
    ("format_name", "header"), [("azure", AZURE), ("burstgpt", BURSTGPT), ("csv", "t,in,out\n")]
)
def test_a_header_without_rows_is_refused(tmp_path: Path, format_name: str, header: str) -> None:
    for text in (header, header.rstrip("\n"), header.replace("\n", "\r\n"), "\ufeff" + header):
        with pytest.raises(ConfigError, match="has no requests"):
            load_text(tmp_path, text, format_name, columns=COLUMNS)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2023-11-16 18:15:47.0,-3,44", "line 3: ContextTokens is -3, and a length cannot be negative"),
        ("2023-11-16 18:15:47.0,12,4.5", "line 3: GeneratedTokens is '4.5', not a whole number"),
        ("2023-11-16 18:15:47.0,,44", "line 3: ContextTokens is '', not a whole number"),
        ("2023-11-16 18:15:47.0,12", "line 3: 2 fields where the header has 3"),
        ("yesterday,12,44", "line 3: TIMESTAMP is 'yesterday', not a time"),
        ("2023-11-16 18:15:47.0,99999999999,44", "line 3: ContextTokens is 99999999999, more than"),
        ("2023-11-16 18:15:47.0,99999999999999999999,44", "line 3: ContextTokens is 9999"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_text(tmp_path, azure("2023-11-16 18:15:46.6805900,374,44", row, "2023-11-16 18:15:48,1,1"))
    assert message in str(refused.value)
    assert refused.value.field == "workload.path"


def test_the_line_counts_blank_lines(tmp_path: Path) -> None:
    text = AZURE + "\n\n2023-11-16 18:15:46.68,374,44\n\n2023-11-16 18:15:47,-1,44\n"
    with pytest.raises(ConfigError, match="line 6: ContextTokens is -1"):
        load_text(tmp_path, text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "empty"),
        (AZURE, "no requests"),
        (AZURE.rstrip("\n"), "no requests"),
        (
            "TIMESTAMP,Context,GeneratedTokens\n",
            "line 1 lacks 'ContextTokens'; it has 'TIMESTAMP', 'Context'",
        ),
        (gzip.compress(TWO_ROWS.encode(), mtime=0)[:-20], "cannot be read"),
        (b"\x1f\x8bnot gzip at all", "cannot be read"),
        (b"\xff\xfe\x00\x01", "line 1 lacks"),
        (azure("2023-11-16 18:15:46,0,44", "2023-11-16 18:15:46,374,0"), "every request has 0"),
    ],
)
def test_a_file_without_requests_is_refused(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_text(tmp_path, content)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="workload.path=.*nowhere.csv.*No such file"):
        load_trace(tmp_path / "nowhere.csv", "azure", Shaping())
    with pytest.raises(ConfigError, match="cannot be read"):
        load_trace(tmp_path, "azure", Shaping())


def test_the_header_can_be_checked_without_reading_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE + "nonsense\n")
    check_trace(path, "azure")
    with pytest.raises(ConfigError, match="lacks 'Timestamp', 'Request tokens', 'Response tokens'"):
        check_trace(path, "burstgpt")
    with pytest.raises(ConfigError, match="line 1 is not a JSON object.*workload.format=azure"):
        check_trace(path, "mooncake")


def test_json_lines_read_as_a_table_are_refused_with_the_formats_that_have_their_columns(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [1, 2]}\n')
    fitting = "mooncake or qwen_bailian or timed_trace"
    with pytest.raises(ConfigError, match=f"is a JSON object, not column names.*workload.format={fitting}"):
        check_trace(path, "azure")


def test_an_unknown_format_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="azure, mooncake, burstgpt, qwen_bailian, timed_trace, csv"):
        load_text(tmp_path, TWO_ROWS, "azur")


@pytest.mark.parametrize(
    "header",
    [
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
    ],
    ids=["1 and 2", "3"],
)
def test_burstgpt_counts_seconds_and_leaves_out_failed_requests(tmp_path: Path, header: str) -> None:
    def row(second: str, prompt_len: int, output_len: int) -> str:
        values = {
            "Timestamp": second,
            "Model": "GPT-4",
            "Request tokens": prompt_len,
            "Response tokens": output_len,
        }
        return ",".join(str(values.get(name, "x")) for name in header.split(","))

    text = "\n".join([header, row("5", 472, 18), row("45.5", 1087, 0), row("118", 417, 276)])
    workload = load_text(tmp_path, text, "burstgpt")
    assert workload.arrival_s.tolist() == [0.0, 113.0]
    assert lengths(workload) == [(472, 18), (417, 276)]
    assert workload.notes["num_without_tokens"] == 1


def jsonl(*records: tuple[float, int, int]) -> str:
    keys = ("timestamp", "input_length", "output_length")
    return "".join(
        json.dumps(dict(zip(keys, record, strict=True)) | {"hash_ids": [1, 2], "turn": 1}) + "\n"
        for record in records
    )


@pytest.mark.parametrize(
    ("format_name", "kwargs", "gap_s"),
    [
        ("mooncake", {}, 1.0),
        ("qwen_bailian", {}, 1000.0),
        ("timed_trace", {}, 1000.0),
        ("timed_trace", {"sec_multiplier": 0.5}, 500.0),
    ],
)
def test_each_jsonl_format_has_its_own_unit_of_time(
    tmp_path: Path, format_name: str, kwargs: dict[str, float], gap_s: float
) -> None:
    workload = load_text(tmp_path, jsonl((500, 7, 8), (1500, 9, 10)), format_name, **kwargs)
    assert workload.arrival_s.tolist() == [0.0, gap_s]
    assert lengths(workload) == [(7, 8), (9, 10)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"timestamp": 1, "input_length": -1, "output_length": 2}', "line 2: input_length is -1"),
        ('{"timestamp": 1, "output_length": 2}', "line 2: input_length is None"),
        ('{"timestamp": 1, "input_length": 1.5, "output_length": 2}', "line 2: input_length is 1.5"),
        ('{"timestamp": 1, "input_length": 1, "output_le', "line 2: not a JSON object"),
        ('{"timestamp": null, "input_length": 1, "output_length": 2}', "line 2: timestamp is None"),
        ("[1, 2, 3]", "line 2: not a JSON object"),
    ],
)
def test_a_bad_json_line_is_refused_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_text(tmp_path, jsonl((0, 7, 8)) + line + "\n", "qwen_bailian")
    assert message in str(refused.value)


def test_csv_reads_the_columns_that_it_is_told(tmp_path: Path) -> None:
    columns = {"arrival_s": "t", "prompt_len": "in", "output_len": "out"}
    workload = load_text(tmp_path, "out,t,in\n5,0.25,3\n6,1,4\n", "csv", columns=columns)
    assert workload.arrival_s.tolist() == [0.0, 0.75]
    assert lengths(workload) == [(3, 5), (4, 6)]


def test_csv_takes_dates_too(tmp_path: Path) -> None:
    columns = {"arrival_s": "t", "prompt_len": "in", "output_len": "out"}
    text = "t,in,out\n2024-05-10T00:00:00Z,3,5\n2024-05-10T00:01:00Z,4,6\n"
    assert load_text(tmp_path, text, "csv", columns=columns).arrival_s.tolist() == [0.0, 60.0]


def test_csv_without_column_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="workload.columns.output_len"):
        load_text(tmp_path, TWO_ROWS, "csv", columns={"arrival_s": "t", "prompt_len": "in"})


def test_unsorted_stamps_are_sorted_and_counted(tmp_path: Path) -> None:
    workload = load_text(tmp_path, jsonl((3, 7, 8), (1, 9, 10), (2, 11, 12)), "qwen_bailian")
    assert workload.arrival_s.tolist() == [0.0, 1.0, 2.0]
    assert lengths(workload) == [(9, 10), (11, 12), (7, 8)]
    assert workload.notes["num_out_of_order"] == 1


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.sampled_from(["azure", "burstgpt", "mooncake", "timed_trace", "csv"]))
def test_a_spoiled_file_is_loaded_or_refused_and_nothing_else(
    tmp_path: Path, data: st.DataObject, format_name: str
) -> None:
    text = {
        "azure": TWO_ROWS,
        "csv": TWO_ROWS,
        "burstgpt": "Timestamp,Model,Request tokens,Response tokens\n5,GPT-4,472,18\n6.5,GPT-4,1,2\n",
    }.get(format_name, jsonl((500, 7, 8), (1500, 9, 10)))
    content = bytearray(text.encode())
    for _ in range(data.draw(st.integers(0, 4))):
        start = data.draw(st.integers(0, len(content)))
        end = data.draw(st.integers(start, min(start + 9, len(content))))
        content[start:end] = data.draw(
            st.binary(max_size=6) | st.sampled_from([b",", b"\n", b'"', b"-", b"9" * 12])
        )
    columns = {"arrival_s": "TIMESTAMP", "prompt_len": "ContextTokens", "output_len": "GeneratedTokens"}
    packed = gzip.compress(bytes(content)) if data.draw(st.booleans()) else bytes(content)
    try:
        workload = load_text(tmp_path, packed, format_name, columns=columns)
    except ConfigError:
        return
    assert workload.prompt_len.min() >= 1 and workload.output_len.min() >= 1
    assert np.all(np.diff(workload.arrival_s) >= 0) and np.isfinite(workload.arrival_s).all()


def many_rows(tmp_path: Path, num_rows: int) -> Path:
    path = tmp_path / "many.csv"
    rng = np.random.default_rng(0)
    prompt_len, output_len = rng.integers(1, 4000, (2, num_rows))
    stamps = np.datetime64("2023-11-16T18:00:00", "ns") + np.arange(num_rows) * np.timedelta64(
        1_234_500, "ns"
    )
    texts = np.char.replace(np.datetime_as_string(stamps, unit="ns"), "T", " ")
    rows = (f"{t[:-2]},{p},{o}\n" for t, p, o in zip(texts, prompt_len, output_len, strict=True))
    path.write_text(AZURE + "".join(rows))
    return path


def test_a_million_rows_are_read_or_refused_by_the_line_that_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "million.csv"
    block = "".join(f"{second}.5,{second},7\n" for second in range(1, 1001))
    path.write_text("t,in,out\n" + 1000 * block)
    workload = load_trace(path, "csv", Shaping(), COLUMNS)
    assert len(workload) == 1_000_000
    assert workload.notes["num_out_of_order"] == 999
    assert workload.prompt_len[-1] == 1000
    with path.open("a") as file:
        file.write("1,-1,7\n")
    with pytest.raises(ConfigError, match="line 1000002: in is -1, and a length cannot be negative"):
        load_trace(path, "csv", Shaping(), COLUMNS)


def test_a_hundred_thousand_rows_are_loaded_as_columns_not_as_objects(tmp_path: Path) -> None:
    path = many_rows(tmp_path, 100_000)
    load_text(tmp_path, TWO_ROWS)  # imports pyarrow
    tracemalloc.start()
    workload = load_trace(path, "azure", Shaping(max_seq_len=2048))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(workload) == 100_000
    assert workload.arrival_s[-1] == pytest.approx(99_999 * 1.2345e-3)
    assert peak_bytes < 16 * 2**20
