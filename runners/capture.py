"""Captures one size after another, and leaves a record of each or an error that names the remedy."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runners.capture_memory import MemoryReading, read_memory
from runners.errors import CaptureError, CaptureOutOfMemoryError, RunnerError
from runners.forward_batch import ForwardBatch
from runners.graph_backend import DecodeGraph, create_graph
from runners.graph_pool import PoolHandle
from runners.models.head_output import head_writes_to

Forward = Callable[[ForwardBatch], torch.Tensor]

#: After the call that compiled, Inductor's graph trees record in the next one and replay from then on.
_INDUCTOR_WARMUP_STEPS = 2
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_ASKED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)", re.IGNORECASE)
_FREE = re.compile(r"of which ([\d.]+) ?(bytes|KiB|MiB|GiB) is free", re.IGNORECASE)


@dataclass(frozen=True)
class CaptureRecord:
    """One captured size: the columns of `capture.csv`. What was not measured is None.

    Bytes are what this size added by memory class. Sizes are captured largest first, so the first
    row carries the one-off cost and the later ones the marginal costs; their sum is the total.
    """

    capture_size: int
    graph_backend: str
    compiled: bool
    compile_s: float | None
    warmup_s: float
    capture_s: float | None
    pool_bytes: int | None
    torch_bytes: int | None
    device_bytes: int | None
    pinned_bytes: int | None
    num_nodes: int | None

    def as_row(self) -> dict[str, Any]:
        """Return the record as a row, its columns in order."""
        return asdict(self)


@dataclass(frozen=True)
class CompileCost:
    """What compiling one size took: seconds, and bytes by memory class."""

    compile_s: float
    memory: MemoryReading


class StepCapturer:
    """Warms up and captures decode steps of falling size, all into one pool and one output buffer.

    Args:
        device: where the steps run.
        pool: the pool of the graphs' temporary memory; None where Inductor makes the graphs.
        num_warmup_steps: eager steps before each capture, ≥ 1: they load kernels lazily, which a capture
            must not, and the first one tells the shape and dtype of the logits.
        dump_dir: folder for the graphs in DOT, or None.
        head: the module that makes the logits; it writes them to the output buffer if it can.
        generator: what the steps draw random numbers from, or None.
        compiles_head: the head is a part of what is compiled, where a size is compiled.
    """

    def __init__(
        self,
        device: torch.device,
        pool: PoolHandle | None,
        num_warmup_steps: int,
        dump_dir: Path | None = None,
        head: nn.Module | None = None,
        generator: torch.Generator | None = None,
        compiles_head: bool = True,
    ) -> None:
        self._device = device
        self._pool = pool
        self._num_warmup_steps = num_warmup_steps
        self._dump_dir = dump_dir
        self._head = head
        self._compiles_head = compiles_head
        self._generator = generator
        #: `[largest size, vocab_size]`, made by the first capture.
        self.output: torch.Tensor | None = None

    def compile(self, batch: ForwardBatch, forward: Forward) -> CompileCost:
        """Call `forward` for the first time: it compiles, and benchmarks kernels where it autotunes."""
        before, started = read_memory(self._device, self._pool), time.perf_counter()
        forward(batch)
        self._synchronize()
        seconds = time.perf_counter() - started
        return CompileCost(seconds, read_memory(self._device, self._pool).since(before))

    def capture(
        self, batch: ForwardBatch, forward: Forward, cost: CompileCost | None = None
    ) -> tuple[DecodeGraph, torch.Tensor, CaptureRecord]:
        """Return the graph of `forward(batch)`, its view of the output buffer, and the record.

        `cost` is what compiling `forward` took, if it was compiled.
        """
        assert self._pool is not None
        size = batch.batch_size
        before, started = read_memory(self._device, self._pool), time.perf_counter()
        output = self._warm_up(batch, forward)
        # Compiled code is not to see another head than the one that it was compiled with.
        head = None if cost is not None and self._compiles_head else self._head
        warmed = time.perf_counter()

        def step() -> None:
            # One buffer for all sizes: a graph that kept its own logits would keep its own memory too.
            with head_writes_to(head, output):
                logits = forward(batch)
            if logits.data_ptr() != output.data_ptr():
                output.copy_(logits)

        dump_path = self._dump_dir and self._dump_dir / f"decode_{size}.dot"
        graph = create_graph(self._device, dump_path, self._generator)
        graph.capture(step, self._pool)
        self._synchronize()
        captured = time.perf_counter()
        growth = read_memory(self._device, self._pool).since(before)
        record = CaptureRecord(
            capture_size=size,
            graph_backend=graph.backend,
            compiled=cost is not None,
            compile_s=None if cost is None else cost.compile_s,
            warmup_s=warmed - started,
            capture_s=captured - warmed,
            **asdict(growth if cost is None else growth.plus(cost.memory)),
            num_nodes=graph.num_nodes,
        )
        return graph, output, record

    def warm_up_inductor(self, batch: ForwardBatch, forward: Forward, cost: CompileCost) -> CaptureRecord:
        """Run the steps in which Inductor records its own graph of `forward(batch)`; return the record."""
        before, started = read_memory(self._device, self._pool), time.perf_counter()
        for _ in range(max(self._num_warmup_steps, _INDUCTOR_WARMUP_STEPS)):
            forward(batch)
        self._synchronize()
        warmed = time.perf_counter()
        growth = read_memory(self._device, self._pool).since(before)
        return CaptureRecord(
            capture_size=batch.batch_size,
            graph_backend="inductor",
            compiled=True,
            compile_s=cost.compile_s,
            warmup_s=warmed - started,
            capture_s=None,
            **asdict(growth.plus(cost.memory)),
            num_nodes=None,
        )

    def _warm_up(self, batch: ForwardBatch, forward: Forward) -> torch.Tensor:
        for _ in range(self._num_warmup_steps):
            logits = forward(batch)
        if self.output is None:
            self.output = torch.zeros_like(logits)
        self._synchronize()
        return self.output[: batch.batch_size]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def capture_error(error: Exception, capture_size: int) -> RunnerError:
    """Return the typed error for a failed capture of `capture_size`; typed errors stay themselves.

    Clears the local variables of the failed frames: the traceback would keep the activations of the
    size that did not fit, and with them the memory that the next capture needs.
    """
    traceback.clear_frames(error.__traceback__)
    if isinstance(error, RunnerError):
        return error
    if _is_out_of_memory(error):
        return _out_of_memory(str(error), capture_size)
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return CaptureError(
            f"torch.compile failed at size {capture_size}: {error}\nSet compile.fullgraph=false to have graph breaks "
            "counted instead, or compile.mode=none."
        )
    return CaptureError(
        f"the capture of size {capture_size} failed: {error} Find the step that cannot be captured with "
        "runner.kind=eager, or leave the size out of capture.sizes."
    )


def _out_of_memory(message: str, capture_size: int) -> CaptureOutOfMemoryError:
    missing = _missing_bytes(message)
    lacked = "" if missing is None else f", {missing:,} bytes short"
    return CaptureOutOfMemoryError(
        f"the capture of size {capture_size} ran out of memory{lacked}. Choose one: lower attention.num_pages, "
        "so that the KV pool leaves room; lower runner.max_batch_size or capture.max_size; or capture fewer "
        "sizes, for example capture=powers_of_two.",
        capture_size=capture_size,
        missing_bytes=missing,
    )


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def _missing_bytes(message: str) -> int | None:
    """Return how much the allocator asked for beyond what was free, from torch's message."""
    asked = _bytes_in(_ASKED, message)
    if asked is None:
        return None
    free = _bytes_in(_FREE, message) or 0
    return asked - free if free < asked else asked


def _bytes_in(pattern: re.Pattern[str], message: str) -> int | None:
    match = pattern.search(message)
    if match is None:
        return None
    unit = next(factor for name, factor in _UNITS.items() if name.lower() == match[2].lower())
    return round(float(match[1]) * unit)
