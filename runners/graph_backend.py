"""A captured step: a CUDA graph, or without CUDA its emulation."""

from __future__ import annotations

import ctypes
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from runners.graph_pool import PoolHandle


class DecodeGraph(ABC):
    """One captured function. It reads and writes the tensors that it was captured with."""

    #: `cuda` or `emulated`; recorded beside every latency.
    backend: str
    #: Nodes of the graph, or None if nobody counted them.
    num_nodes: int | None = None

    @abstractmethod
    def capture(self, step: Callable[[], None], pool: PoolHandle) -> None:
        """Capture one call of `step` on the current stream, its temporary memory in `pool`.

        If `step` raises, the stream is out of capture mode again before the error leaves.
        """

    @abstractmethod
    def replay(self) -> None:
        """Queue the captured work on the current stream."""

    @abstractmethod
    def reset(self) -> None:
        """Free the graph and its hold on the pool. It cannot be replayed again."""


class EmulatedGraph(DecodeGraph):
    """Replays by calling the captured function again, on the same static buffers.

    Padding, planning, aliasing and bookkeeping are those of a CUDA graph. Latencies are not.
    """

    backend = "emulated"

    def __init__(self) -> None:
        self._step: Callable[[], None] | None = None

    def capture(self, step: Callable[[], None], pool: PoolHandle) -> None:
        step()
        self._step = step

    def replay(self) -> None:
        assert self._step is not None, "replay of a graph that was not captured, or was reset"
        self._step()

    def reset(self) -> None:
        self._step = None


class CudaGraph(DecodeGraph):
    """A `torch.cuda.CUDAGraph`, captured in `thread_local` mode into a shared private pool.

    In the default `global` mode a CUDA call of any other thread (a tokenizer, a metrics exporter)
    invalidates the capture (vllm#48053).

    Args:
        dump_path: where to write the graph in DOT after the capture; None for nowhere.
        generator: draws new random numbers in each replay, beside the device's default generator.
    """

    backend = "cuda"

    def __init__(self, dump_path: Path | None = None, generator: torch.Generator | None = None) -> None:
        # keep_graph leaves the cudaGraph_t readable, so that its nodes can be counted and dumped.
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        if generator is not None:
            self._graph.register_generator_state(generator)
        self._dump_path = dump_path

    def capture(self, step: Callable[[], None], pool: PoolHandle) -> None:
        if self._dump_path is not None:
            self._graph.enable_debug_mode()
        handle = torch.cuda._POOL_HANDLE(pool)
        self._graph.capture_begin(pool=handle, capture_error_mode="thread_local")
        try:
            step()
        except BaseException:
            self._abandon(pool)
            raise
        try:
            self._graph.capture_end()
        except BaseException:
            _end_allocation_to(pool)
            raise
        self._graph.instantiate()
        self.num_nodes = _count_nodes(self._graph.raw_cuda_graph())
        if self._dump_path is not None:
            self._graph.debug_dump(str(self._dump_path))

    def _abandon(self, pool: PoolHandle) -> None:
        """Take the stream and the allocator out of capture mode after a failed step."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # "the graph is empty": we know
                self._graph.capture_end()
        except RuntimeError:
            # The capture was invalidated: ending it reports the step's own error a second time.
            _end_allocation_to(pool)

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self._graph.reset()


def create_graph(
    device: torch.device, dump_path: Path | None = None, generator: torch.Generator | None = None
) -> DecodeGraph:
    """Return a graph to capture on `device`: a CUDA graph there, an emulated one elsewhere.

    `generator` is one, on `device`, that the captured function draws from.
    """
    return CudaGraph(dump_path, generator) if device.type == "cuda" else EmulatedGraph()


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Run the block on a stream that may capture: the current one, or in place of the default one its own.

    A stream of its own is ordered after and before the default one. Warm-up and capture share it: cuBLAS
    keeps a workspace per stream.
    """
    if device.type != "cuda" or torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
        yield
        return
    with own_stream(device):
        yield


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Run the block on a new stream, ordered after and before the current one; without CUDA, as it is.

    What captures and replays here keeps one cuBLAS workspace, 32 MiB on Hopper, where a capture beside
    the default stream keeps two.
    """
    if device.type != "cuda":
        yield
        return
    outer, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    stream.wait_stream(outer)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        outer.wait_stream(stream)


def _end_allocation_to(pool: PoolHandle) -> None:
    """Undo what `capture_end` leaves undone when ending the capture fails (pytorch#190348).

    The allocator would go on serving this process from the pool, as if a capture were in progress.
    """
    device = torch.cuda.current_device()
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:
        return  # this torch had ended it
    torch._C._cuda_releasePool(device, pool)


def _count_nodes(raw_graph: int) -> int | None:
    """Count a graph's nodes by the driver, or return None where that is not possible."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_size_t(0)
    status = driver.cuGraphGetNodes(ctypes.c_void_p(raw_graph), None, ctypes.byref(count))
    return int(count.value) if status == 0 else None
