"""What a job would take, before it runs: graphs by the capture list, memory by arithmetic, seconds by a record.

Seconds are told only where a committed record of the same GPU, model and implementation is there to scale;
without that ground they are unknown.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.capture_list import capture_list
from harness.model_size import model_size
from harness.nvidia import visible_gpus
from harness.record import RESULT_FILE

if TYPE_CHECKING:
    from harness.schema import Config

_MIB = 1024**2
#: Records that ship with a checkout.
RECORDS = Path(__file__).parents[1] / "docs" / "results"


@dataclass(frozen=True)
class Estimate:
    """What is known of a job before it runs; None where there is no ground for a figure."""

    capture_sizes: tuple[int, ...]
    seconds: float | None
    #: What `seconds` rests on, or why there are none.
    seconds_ground: str
    memory_mib: float | None
    memory_ground: str


def estimate(config: Config) -> Estimate:
    """Return what a job of `config`, checked, would take on this machine. Loads no weight and no torch."""
    sizes = tuple(capture_list(config).sizes) if config.runner.kind == "cuda_graph" else ()
    seconds, seconds_ground = _seconds(config, len(sizes))
    memory_bytes, memory_ground = _memory(config)
    memory_mib = None if memory_bytes is None else memory_bytes / _MIB
    return Estimate(sizes, seconds, seconds_ground, memory_mib, memory_ground)


def _memory(config: Config) -> tuple[int | None, str]:
    """Weights, cache and logits: what the job's own budget counts beside graphs and workspaces."""
    size = model_size(config)
    if size.weight_bytes is None or size.kv_bytes_per_token is None:
        return None, "the model's shape is not on this machine, or is of a type that is not counted"
    page_size, pages = config.attention.page_size, config.attention.num_pages
    num_pages = pages or config.runner.max_batch_size * -(-config.model.max_seq_len // page_size) + 1
    logits = 3 * config.runner.max_batch_size * (size.vocab_size or 0) * (size.item_bytes or 0)
    at_most = "" if pages or not _uses_gpu(config) else " at most: the pool shrinks to what is free"
    total = size.weight_bytes + num_pages * page_size * size.kv_bytes_per_token + logits
    return total, f"weights, KV pool and logits by arithmetic, without graphs and workspaces{at_most}"


def _uses_gpu(config: Config) -> bool:
    return config.device != "cpu" and bool(visible_gpus())


def _seconds(config: Config, num_sizes: int) -> tuple[float | None, str]:
    if not _uses_gpu(config):
        return None, "no record of this processor to scale"
    gpu = visible_gpus()[0].name
    record = next((record for record in _records() if _is_alike(record, config, gpu)), None)
    if record is None:
        return None, f"no record of {gpu} with this model, implementation and compile mode to scale"
    timings, rows = record["result"]["timings"], record["num_rows"]
    share = num_sizes / max(1, record["num_sizes"])
    seconds = (
        timings["validate_s"] + timings["build_s"] + share * (timings["capture_s"] + timings["parity_s"])
    )
    ground = f"scaled by sizes from {record['name']}"
    if config.measure.enabled:
        limit = config.measure.timeout_s / record["result"]["config"]["measure"]["timeout_s"]
        seconds += timings["size_sweep_s"] * _num_points(config, num_sizes) / max(1, rows) * min(1.0, limit)
    return seconds, ground + (", and the workload's own time comes on top" if config.workload.enabled else "")


def _num_points(config: Config, num_sizes: int) -> int:
    """Rows of the size sweep, about: each size with its graph and eager, at each context length."""
    sizes = len(config.measure.batch_sizes) or num_sizes + min(16, num_sizes)
    return 2 * sizes * len(config.measure.context_lens)


@functools.cache
def _records() -> list[dict[str, Any]]:
    found = []
    for path in sorted(RECORDS.rglob(RESULT_FILE)):
        result, sizes = json.loads(path.read_bytes()), path.with_name("sizes.csv")
        if result.get("timings") and result.get("capture") and sizes.exists():
            num_rows = len(sizes.read_text(encoding="utf-8").splitlines()) - 1
            name = str(path.parent.relative_to(RECORDS.parent.parent))
            num_sizes = len(result["capture"]["sizes"])
            found.append({"name": name, "result": result, "num_rows": num_rows, "num_sizes": num_sizes})
    return found


def _is_alike(record: dict[str, Any], config: Config, gpu: str) -> bool:
    result = record["result"]
    measured, compiled = result["config"], result["config"]["compile"]
    return (
        result["environment"]["device_name"] == gpu
        and result["model"]["name"] == config.model.name
        and measured["model"]["implementation"] == config.model.implementation
        and compiled["mode"] == config.compile.mode
        and (config.compile.mode == "none" or compiled["scope"] == config.compile.scope)
    )
