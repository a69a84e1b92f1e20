"""The published formats of serving traces: which columns, in which units. One row of a table each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from harness.errors import ConfigError

#: How a time is written: a date and time, or a number of seconds or milliseconds.
TimeUnit = Literal["datetime", "s", "ms"]


@dataclass(frozen=True)
class TraceFormat:
    """Where the three numbers of a request stand in a file."""

    container: Literal["csv", "jsonl"]
    timestamp: str
    prompt_len: str
    output_len: str
    #: Explicit in every format: a wrong guess is an error of 1000x.
    unit: TimeUnit
    #: The stamps were rounded down to multiples of this; requests of one bucket are spread over it.
    bucket_s: float | None = None
    #: The file has prefix block hashes. There is no prefix cache here, so they are ignored, and it is said.
    has_hash_ids: bool = False

    @property
    def columns(self) -> tuple[str, str, str]:
        return self.timestamp, self.prompt_len, self.output_len


#: Sources: Azure/AzurePublicDataset (2023: seven fractional digits, 2024: six and +00:00),
#: kvcache-ai/Mooncake FAST25-release/traces (ms, in buckets of 3 s), HPMLL/BurstGPT (1 and 2; 3 has two
#: columns more, which are not read), alibaba-edu/qwen-bailian-usagetraces-anon (s),
#: vllm bench serve --dataset-name timed_trace (s, times --timed-trace-sec-multiplier).
FORMATS: dict[str, TraceFormat] = {
    "azure": TraceFormat("csv", "TIMESTAMP", "ContextTokens", "GeneratedTokens", "datetime"),
    "mooncake": TraceFormat(
        "jsonl", "timestamp", "input_length", "output_length", "ms", bucket_s=3.0, has_hash_ids=True
    ),
    "burstgpt": TraceFormat("csv", "Timestamp", "Request tokens", "Response tokens", "s"),
    "qwen_bailian": TraceFormat(
        "jsonl", "timestamp", "input_length", "output_length", "s", has_hash_ids=True
    ),
    "timed_trace": TraceFormat("jsonl", "timestamp", "input_length", "output_length", "s", has_hash_ids=True),
}


def trace_format(name: str, columns: Mapping[str, str | None] | None = None) -> TraceFormat:
    """Return the format called `name`; `csv` takes its column names from `columns`.

    `columns` has the keys arrival_s, prompt_len and output_len. The time may be seconds or a date and
    time; which of the two is told by the first row, for they cannot be confused. ConfigError names the
    column that is not given, or the formats there are.
    """
    if name == "csv":
        named = {key: _column(columns or {}, key) for key in ("arrival_s", "prompt_len", "output_len")}
        return TraceFormat("csv", named["arrival_s"], named["prompt_len"], named["output_len"], "s")
    if name not in FORMATS:
        raise ConfigError("workload.format", name, f"choose one of {', '.join([*FORMATS, 'csv'])}")
    return FORMATS[name]


def _column(columns: Mapping[str, str | None], key: str) -> str:
    name = columns.get(key)
    if not name:
        raise ConfigError(
            f"workload.columns.{key}", None, "format=csv needs the name of the column that holds it"
        )
    return name
