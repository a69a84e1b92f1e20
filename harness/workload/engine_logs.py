"""Reads what engines in production log of their decode batches: block by block, whatever the file's size.

Only lines that bear an engine's mark are looked at; those that bear it and cannot be read are counted
and shown, and never end the import.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import ConfigError
from harness.workload.logged_batches import BatchCounts, LoggedBatches
from harness.workload.trace_file import open_trace

if TYPE_CHECKING:
    from typing import BinaryIO

_BLOCK_BYTES = 4 << 20
#: A JSON object longer than this is given up.
_MAX_OBJECT = 16 << 20
#: Cumulative statistics of one block that are looked at, at most: later lines contain the earlier ones.
_MAX_CUMULATIVE = 64

# vllm/compilation/cuda_graph.py, CUDAGraphLogging: a table for each logging interval.
_VLLM_ROW = re.compile(rb"\| *(\d+) *\| *(\d+) *\| *(\d+) *\| *(\w+) *\| *(\d+) *\|[ \r]*$", re.MULTILINE)
_VLLM_TABLE_LINE = re.compile(rb"^[^|\n]*\|[^\n]*\|[ \r]*$", re.MULTILINE)
_VLLM_HEADING = re.compile(rb"Unpadded Tokens|\|[-|]+\|[ \r]*$")
_VLLM_CAPTURE_SIZES = re.compile(rb"- Capture sizes: \[([\d, ]*)\]")
# vllm/forward_context.py, set_forward_context: cumulative since the process started.
_VLLM_STATS_MARK = b"Batchsize forward time stats"
_VLLM_STATS = re.compile(
    rb"^([^\n]*)Batchsize forward time stats \(batchsize, count, median_time\(ms\)\): "
    rb"(\[(?:\(\d+, \d+, [\d.e+-]+\)(?:, )?)+\])[ \r]*$"
)
_VLLM_STAT = re.compile(rb"\((\d+), (\d+), ([\d.e+-]+)\)")
# sglang/srt/managers/scheduler_metrics_mixin.py, log_decode_stats: one line each --decode-log-interval steps.
_SGLANG_MARK = b"Decode batch"
_SGLANG_DECODE = re.compile(
    rb"Decode batch[^#\n]*#running-req: (\d+)(?:, #(?:full )?token: (\d+))?([^\n]*?)"
    rb"gen throughput \(token/s\): (\d+(?:\.\d+)?)"
)
_SGLANG_ACCEPT = re.compile(rb"accept len: ([\d.]+)")
_SGLANG_GAUGE = re.compile(rb"^sglang:num_running_reqs(?:\{[^}\n]*\})? ([^\n]*)$", re.MULTILINE)
# tensorrt_llm/_torch/pyexecutor/py_executor.py: statistics as JSON, and print_iter_log.
_JSON_START = re.compile(rb"\s*(?:\{|\[\s*[\[{])")
_TRTLLM_MARK = b"host_step_time"
_TRTLLM_ITER = re.compile(
    rb"host_step_time = ([\d.]+) ?ms[^\n]*'num_ctx_requests': (\d+)[^\n]*'num_generation_tokens': (\d+)"
)


def load_engine_log(path: str | Path, format_name: str) -> LoggedBatches:
    """Read the log at `path` (plain or gzip) of the engine that `format_name` names.

    `vllm_log`: the tables of --cudagraph-metrics, and the lines of VLLM_LOG_BATCHSIZE_INTERVAL.
    `sglang_log`: the decode lines, or else scraped metrics. `tensorrt_llm_stats`: iteration statistics as
    JSON (an object a line, or an array), or the lines of print_iter_log.
    Raises ConfigError for a file that cannot be read or has no decode step, naming what was malformed.
    """
    if format_name not in ENGINE_LOG_FORMATS:
        raise ConfigError("--format", format_name, f"choose one of {', '.join(ENGINE_LOG_FORMATS)}")
    batches = LoggedBatches()
    try:
        with open_trace(path) as file:
            ENGINE_LOG_FORMATS[format_name](file, batches)
    except (OSError, EOFError) as error:
        raise ConfigError("--workload", path, f"cannot be read: {error}") from error
    if not batches.num_steps:
        shown = f"; malformed: {batches.malformed_examples[0]!r}" if batches.malformed_examples else ""
        raise ConfigError("--workload", path, f"has no decode step in the format {format_name}{shown}")
    return batches


def _blocks(file: BinaryIO, batches: LoggedBatches) -> Iterator[bytes]:
    """Yield whole lines, a few MiB at once; a longer line comes in pieces."""
    rest = b""
    while block := file.read(_BLOCK_BYTES):
        batches.num_bytes += len(block)
        end = block.rfind(b"\n") + 1
        if end or len(rest) > _MAX_OBJECT:
            yield rest + block[:end]
            rest = block[end:]
        else:
            rest += block
    if rest:
        yield rest


def _lines_with(block: bytes, mark: bytes) -> Iterator[bytes]:
    start = block.find(mark)
    while start >= 0:
        begin = block.rfind(b"\n", 0, start) + 1
        end = block.find(b"\n", start)
        end = len(block) if end < 0 else end
        yield block[begin:end]
        start = block.find(mark, end)


def _read_vllm(file: BinaryIO, batches: LoggedBatches) -> None:
    """Tables win: they have unpadded sizes, and tell decode steps (FULL) from the rest."""
    last: dict[bytes, dict[int, tuple[int, float]]] = {}
    logged = LoggedBatches()
    for block in _blocks(file, batches):
        _read_vllm_tables(block, batches)
        _read_vllm_stats(block, logged, last, batches)
    for stats in last.values():
        for size, (count, median_ms) in stats.items():
            batches.times.add(size, median_ms, count=count)
    if batches.slices:
        return
    batches.slices = logged.slices
    if batches.slices:
        batches.notes.append(
            "the batch-size log has padded sizes, and counts steps with prefill by their tokens: "
            "--cudagraph-metrics tells them apart"
        )


def _read_vllm_tables(block: bytes, batches: LoggedBatches) -> None:
    if sizes := _VLLM_CAPTURE_SIZES.findall(block):
        batches.capture_sizes = tuple(int(size) for size in sizes[-1].split(b",") if size.strip())
    if b"Unpadded Tokens" not in block and not _VLLM_ROW.search(block):
        return
    for line in _VLLM_TABLE_LINE.findall(block):
        match = _VLLM_ROW.search(line)
        if match is None:
            if not _VLLM_HEADING.search(line):
                batches.malformed(line)
            continue
        tokens, _, _, mode, count = match.groups()
        if mode == b"FULL":
            batches.add(int(tokens), int(count))
            batches.num_used += 1
        else:
            batches.num_other_steps += int(count)


def _read_vllm_stats(
    block: bytes,
    logged: LoggedBatches,
    last: dict[bytes, dict[int, tuple[int, float]]],
    batches: LoggedBatches,
) -> None:
    """The statistics grow: what a line adds to the one before it of the same process is a slice."""
    lines = []
    for line in _lines_with(block, _VLLM_STATS_MARK):
        match = _VLLM_STATS.match(line)
        if match is None:
            batches.malformed(line)
        else:
            batches.num_used += 1
            lines.append((_process(match[1]), match[2]))
    step = max(1, -(-len(lines) // _MAX_CUMULATIVE))
    for process, listed in lines[::-1][::step][::-1]:
        stats = {int(size): (int(count), float(ms)) for size, count, ms in _VLLM_STAT.findall(listed)}
        counts, before = BatchCounts(), last.get(process, {})
        restarted = any(stats.get(size, (0, 0.0))[0] < count for size, (count, _) in before.items())
        for size, (count, _) in stats.items():
            added = count - (0 if restarted else before.get(size, (0, 0.0))[0])
            if added:
                counts.add(size, added)
        if counts.num_steps:
            logged.add_slice(counts)
        last[process] = stats


def _process(prefix: bytes) -> bytes:
    """The process names that vLLM puts before the level, such as `(EngineCore_DP0 pid=66)`."""
    return b"".join(re.findall(rb"\([^()]*pid=\d+[^()]*\)", prefix))


def _read_sglang(file: BinaryIO, batches: LoggedBatches) -> None:
    """A decode line stands for the steps since the last one: its batch size is a sample of them."""
    scraped = LoggedBatches()
    for block in _blocks(file, batches):
        matches = _SGLANG_DECODE.findall(block)
        for running, tokens, middle, throughput in matches:
            _add_sglang_step(batches, int(running), tokens, middle, float(throughput))
        if len(matches) != block.count(_SGLANG_MARK):
            for line in _lines_with(block, _SGLANG_MARK):
                if not _SGLANG_DECODE.search(line):
                    batches.malformed(line)
        for value in _SGLANG_GAUGE.findall(block):
            try:
                running = int(float(value))
            except (ValueError, OverflowError):
                batches.malformed(b"sglang:num_running_reqs " + value)
                continue
            if running > 0:
                scraped.add(running)
                batches.num_used += not batches.slices
    if not batches.slices:
        batches.slices = scraped.slices
        batches.notes.append("scraped metrics: the running requests at each scrape, without step times")


def _add_sglang_step(
    batches: LoggedBatches, batch_size: int, tokens: bytes, middle: bytes, throughput: float
) -> None:
    if not batch_size:
        batches.num_other_steps += 1
        return
    batches.num_used += 1
    batches.add(batch_size, 1, int(tokens) if tokens else None)
    accepted = _SGLANG_ACCEPT.search(middle) if b"accept" in middle else None
    tokens_per_step = batch_size * (float(accepted[1]) if accepted else 1.0)
    if throughput:
        mode = "eager" if b"graph: False" in middle else "graph"
        batches.times.add(batch_size, 1e3 * tokens_per_step / throughput, mode)


def _read_tensorrt_llm(file: BinaryIO, batches: LoggedBatches) -> None:
    if _JSON_START.match(file.peek(1)):  # type: ignore[attr-defined]
        _read_objects(file, batches)
        return
    for block in _blocks(file, batches):
        for line in _lines_with(block, _TRTLLM_MARK):
            match = _TRTLLM_ITER.search(line)
            if match is None:
                batches.malformed(line)
            else:
                _add_iteration(batches, int(match[2]), int(match[3]), float(match[1]), None)


def _read_objects(file: BinaryIO, batches: LoggedBatches) -> None:
    """Read JSON objects one after another, an array's or a line's, keeping no more than one block."""
    decoder, text = json.JSONDecoder(), ""
    while True:
        block = file.read(_BLOCK_BYTES)
        batches.num_bytes += len(block)
        text += block.decode("utf-8", "replace")
        position = 0
        while (start := text.find("{", position)) >= 0:
            try:
                stats, position = decoder.raw_decode(text, start)
            except ValueError:
                end = text.find("\n", start)
                if end < 0 and block and len(text) - start < _MAX_OBJECT:
                    position = start
                    break
                position = len(text) if end < 0 else end
                batches.malformed(text[start:position])
            else:
                _read_iteration(stats, batches)
        else:
            position = len(text)
        text = text[position:]
        if not block:
            return


def _read_iteration(stats: Any, batches: LoggedBatches) -> None:
    try:
        inflight = stats["inflightBatchingStats"]
        num_context, num_generation = int(inflight["numContextRequests"]), int(inflight["numGenRequests"])
        step_ms = float(stats.get("hostStepTimeMS") or stats.get("iterLatencyMS") or 0.0)
        cache = stats.get("kvCacheStats") or {}
        tokens = (
            int(cache["usedNumBlocks"]) * int(cache["tokensPerBlock"]) if "usedNumBlocks" in cache else None
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        batches.malformed(json.dumps(stats))
        return
    _add_iteration(batches, num_context, num_generation, step_ms, tokens)


def _add_iteration(
    batches: LoggedBatches, num_context: int, num_generation: int, step_ms: float, tokens: int | None
) -> None:
    """Only iterations without context requests are decode steps."""
    if num_context or not num_generation:
        batches.num_other_steps += 1
        return
    batches.num_used += 1
    batches.add(num_generation, 1, tokens)
    batches.times.add(num_generation, step_ms)


ENGINE_LOG_FORMATS: dict[str, Callable[[BinaryIO, LoggedBatches], None]] = {
    "vllm_log": _read_vllm,
    "sglang_log": _read_sglang,
    "tensorrt_llm_stats": _read_tensorrt_llm,
}
