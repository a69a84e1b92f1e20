"""Memory of a job: the budget before anything is built, and what the process held afterwards."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from harness.errors import ConfigError

if TYPE_CHECKING:
    from runners.capture import CaptureRecord
    from runners.model_runner import ModelRunner, RunnerConfig
    from runners.models.loader import LoadedModel

MIB = 1024**2
#: cuBLAS workspaces of two streams and loaded kernels of a CUDA process, beside weights and cache.
_CUDA_OVERHEAD_BYTES = 512 * MIB


@dataclass(frozen=True)
class MemoryBudget:
    """What a job will hold, in bytes, estimated before the cache is allocated."""

    weight_bytes: int
    #: Pages of the KV pool, the null page included, and what they take over all layers.
    num_pages: int
    kv_bytes: int
    #: Logits of eager steps and of a split; the graphs' own count with the graphs.
    logits_bytes: int
    #: What the graphs add, as `capture.csv` counts it: pool, output, workspace, executables.
    graph_bytes: int
    #: FlashInfer's workspaces.
    workspace_bytes: int
    overhead_bytes: int
    free_bytes: int
    #: What measuring takes: the buffer that empties the cache.
    measure_bytes: int = 0

    @property
    def other_bytes(self) -> int:
        """Bytes still to be allocated beside the cache."""
        return self.logits_bytes + self.graph_bytes + self._rest_bytes

    @property
    def _rest_bytes(self) -> int:
        return self.workspace_bytes + self.overhead_bytes + self.measure_bytes

    @property
    def needed_bytes(self) -> int:
        """Bytes still to be allocated once the weights are there."""
        return self.kv_bytes + self.other_bytes

    def check(self) -> None:
        """Raise `ConfigError` if the job will not fit."""
        if self.needed_bytes <= self.free_bytes:
            return
        raise ConfigError(
            "runner.max_batch_size",
            "",
            f"the KV pool ({self.kv_bytes / MIB:,.0f} MiB), logits ({self.logits_bytes / MIB:,.0f} MiB), graphs "
            f"({self.graph_bytes / MIB:,.0f} MiB) and workspaces "
            f"({self._rest_bytes / MIB:,.0f} MiB) need {self.needed_bytes / MIB:,.0f} MiB but {self.free_bytes / MIB:,.0f} MiB are free; lower runner.max_batch_size, model.max_seq_len, "
            "attention.num_pages or capture.max_size",
        )


def kv_bytes_per_token(loaded: LoadedModel, kv_dtype: torch.dtype) -> int:
    """Return the bytes that one token's keys and values take over all layers."""
    groups = (loaded.groups[group_id] for group_id in loaded.layers)
    return sum(2 * g.num_kv_heads * g.head_dim * kv_dtype.itemsize for g in groups)


def plan_memory(
    loaded: LoadedModel,
    config: RunnerConfig,
    device: torch.device,
    memory_fraction: float = 1.0,
    measure_bytes: int = 0,
) -> MemoryBudget:
    """Estimate a job's memory on `device`; the weights are already loaded, and `measure_bytes` will be measured with.

    On CUDA, `num_pages=None` means as many pages as `memory_fraction` of what is free leaves room for,
    between those of one request and those of the whole batch at full length.
    """
    on_cuda = device.type == "cuda"
    page_bytes = config.page_size * kv_bytes_per_token(loaded, config.kv_dtype(loaded.dtype))
    whole = MemoryBudget(
        weight_bytes=loaded.weight_bytes,
        num_pages=config.num_kv_pages,
        kv_bytes=config.num_kv_pages * page_bytes,
        # An eager step's own, and a split's copy of the graphs' output.
        logits_bytes=2 * _logits_bytes(loaded, config.max_batch_size),
        graph_bytes=estimate_graph_bytes(loaded, config)
        if on_cuda
        else _emulated_output_bytes(loaded, config),
        workspace_bytes=_workspace_bytes(loaded, config, device) if on_cuda else 0,
        overhead_bytes=_CUDA_OVERHEAD_BYTES if on_cuda else 0,
        free_bytes=free_device_bytes(device) if on_cuda else _free_host_bytes(),
        measure_bytes=measure_bytes,
    )
    if not on_cuda or config.num_pages is not None:
        return whole
    pages = fitting_pages(whole, page_bytes, config.pages_per_request + 1, memory_fraction)
    return replace(whole, num_pages=pages, kv_bytes=pages * page_bytes)


def fitting_pages(whole: MemoryBudget, page_bytes: int, fewest: int, memory_fraction: float) -> int:
    """Return how many pages of `whole` fit into `memory_fraction` of what is free; at least `fewest`."""
    room = int(whole.free_bytes * memory_fraction) - whole.other_bytes
    return max(min(whole.num_pages, room // page_bytes), fewest)


def cut_warning(budget: MemoryBudget, config: RunnerConfig, memory_fraction: float) -> str | None:
    """Say what follows from a pool that was cut to what fits, or None if it was not."""
    if budget.num_pages >= config.num_kv_pages:
        return None
    return (
        f"the KV pool holds {budget.num_pages} pages, not the {config.num_kv_pages} of {config.max_batch_size} "
        f"requests at full length: attention.memory_fraction={memory_fraction} of the free memory has no room for "
        "more, so the scheduler may preempt, and batches that the pool cannot hold are not measured"
    )


# --- graphs ------------------------------------------------------------------------------------

#: What a node of an instantiated graph takes on the device: 3.1 to 4.0 KiB on an H200, CUDA 13.
_NODE_BYTES = 4096
#: Nodes of a layer, by kind of code, and beside the layers: 58 to 62, 16 to 18, 5 to 11 and 11 to 30 there.
_NODES_A_LAYER = {"transformers": 64, "compiled": 20, "fused": 12}
_OTHER_NODES = 32
#: Activations of a layer that are alive at a time, in units of its widest, and the pool's smallest segments.
_LIVE_ACTIVATIONS, _POOL_SEGMENT_BYTES = 5, 24 * MIB


def estimate_graph_bytes(loaded: LoadedModel, config: RunnerConfig) -> int:
    """Return what capturing will add to the memory held, over all classes of `capture.csv`.

    The constants are an H200's (docs/results/h200), and err on the side of more: the logits may come to lie in
    the block that the eager step before the capture left, and then add nothing.
    """
    if config.kind != "cuda_graph" or config.compile_mode == "reduce_overhead":
        return 0
    largest, compiled = max(config.capture_sizes), set(config.compile_sizes)
    kinds = ("compiled" if size in compiled else loaded.implementation for size in config.capture_sizes)
    nodes = sum(loaded.num_layers * _NODES_A_LAYER[kind] + _OTHER_NODES for kind in kinds)
    widest = int(loaded.hf_config.intermediate_size) * loaded.dtype.itemsize
    pool = _POOL_SEGMENT_BYTES + _LIVE_ACTIVATIONS * largest * widest
    if compiled and config.compile_scope == "model":
        pool += _logits_bytes(loaded, largest)  # a compiled head does not write to the shared output
    return nodes * _NODE_BYTES + pool + _logits_bytes(loaded, largest)


def _emulated_output_bytes(loaded: LoadedModel, config: RunnerConfig) -> int:
    return _logits_bytes(loaded, max(config.capture_sizes, default=0))


def _logits_bytes(loaded: LoadedModel, num_rows: int) -> int:
    return num_rows * loaded.vocab_size * loaded.dtype.itemsize


def _workspace_bytes(loaded: LoadedModel, config: RunnerConfig, device: torch.device) -> int:
    from runners.attention.flashinfer_workspace import needed_workspace_bytes, prefill_token_limit

    return needed_workspace_bytes(
        loaded.groups,
        max_batch_size=config.max_batch_size,
        max_prefill_tokens=prefill_token_limit(config.max_batch_size, config.max_seq_len),
        num_sms=torch.cuda.get_device_properties(device).multi_processor_count,
    )


# --- the machine -------------------------------------------------------------------------------


def free_device_bytes(device: torch.device) -> int:
    """Return what a CUDA device has free, the memory that torch keeps cached included."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def _free_host_bytes() -> int:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return sys.maxsize


def memory_part(budget: MemoryBudget, runner: ModelRunner) -> dict[str, Any]:
    """Return the `memory` part of `result.json`: what was estimated, and what was found after the capture."""
    graphs = runner.graph_runner
    return {
        "budget": asdict(budget),
        "measured_graph_bytes": None if graphs is None else captured_bytes(graphs.capture_records),
        "after_capture": describe_memory(runner.device),
    }


def captured_bytes(records: Sequence[CaptureRecord]) -> int | None:
    """Return what the captures added on the device; None where a class could not be measured."""
    classes = [(row.pool_bytes, row.torch_bytes, row.device_bytes) for row in records]
    known = [num_bytes for row in classes for num_bytes in row if num_bytes is not None]
    return sum(known) if known and len(known) == 3 * len(classes) else None


def describe_memory(device: torch.device) -> dict[str, Any]:
    """Return what the process holds now, in bytes; the CUDA entries are None on a CPU."""
    peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    info: dict[str, Any] = {
        "host_peak_rss_bytes": peak_rss,
        "torch_allocated_bytes": None,
        "torch_reserved_bytes": None,
        "torch_peak_allocated_bytes": None,
        "device_free_bytes": None,
    }
    if device.type == "cuda":
        info |= {
            "torch_allocated_bytes": torch.cuda.memory_allocated(device),
            "torch_reserved_bytes": torch.cuda.memory_reserved(device),
            "torch_peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
            "device_free_bytes": torch.cuda.mem_get_info(device)[0],
        }
    return info
