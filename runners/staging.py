"""Host buffers from which a queued copy may still read, and the copies."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from runners.models.fused import nvrtc

#: Bytes that a thread of the kernel moves, and threads of a CTA: few, so that several multiprocessors fetch.
WORD_BYTES, _THREADS = 16, 128
_SOURCE = Path(nvrtc.__file__).parent / "kernels" / "upload.cu"
#: Up to here the driver sends the bytes along with the command, and no engine has to be waited for.
_FEW_BYTES = 576
#: CU_POINTER_ATTRIBUTE_DEVICE_POINTER of the driver.
_DEVICE_POINTER = 3


class CopyFences:
    """Turns over a few host buffers: one is handed out again only once the copies from it have run.

    Without that the device would receive the next step's numbers. The event of a turn is recorded by
    `settle`, at the latest when the next turn begins: so a step may queue its copies, launch its graph,
    and only then spend the time. An event recorded late waits for more than it must, never for less.
    `settle` also asks whether the buffer of the next turn is free: if it is, that turn calls no driver.

    Args:
        depth: turns, and so the copies that may be queued before `next_turn` has to wait.
        device: where the copies go; nothing to wait for unless it is CUDA.
    """

    def __init__(self, depth: int, device: torch.device) -> None:
        self._events = [torch.cuda.Event() for _ in range(depth)] if device.type == "cuda" else []
        self._depth = depth
        self._turn = 0
        self._is_settled = True
        #: Whether the copies from the next turn's buffer are known to have run. Only while settled.
        self._is_next_free = True

    def next_turn(self) -> int:
        """Return the number of the buffer to write next, once no queued copy reads it."""
        if not self._is_settled:
            self.settle()
        self._turn = turn = (self._turn + 1) % self._depth
        self._is_settled = False
        if not self._is_next_free:
            self._events[turn].synchronize()
        return turn

    def settle(self) -> None:
        """Mark what this turn's buffer feeds: everything queued on the current stream until now."""
        if self._is_settled:
            return
        self._is_settled = True
        if self._events:
            self._events[self._turn].record()
            self._is_next_free = self._events[(self._turn + 1) % self._depth].query()


class Upload:
    """A copy from one host buffer to one device buffer, to be queued again and again.

    From pinned memory it is one call of the driver, with arguments made once: torch's own copy costs the
    host several times as much, cold caches above all. Where it can, that call launches a kernel which reads
    the host buffer: between two graphs the copy engine would let the device idle before and after the copy.
    The buffers must outlive the copies (`CopyFences`).

    Args:
        target: contiguous, on the device.
        source: contiguous, of the same size, on the host; pinned if the target is on a CUDA device.
        by_kernel: leave it to the kernel, or to the driver's copy; None: whichever costs the device less.

    Attributes:
        way: `kernel`, `copy` (the driver's) or `torch`. The kernel needs `cuda-bindings` with NVRTC, and addresses
            and a size that are multiples of 16, and is for more than a few bytes; `copy` needs CUDA and pinned memory.
    """

    def __init__(self, target: torch.Tensor, source: torch.Tensor, by_kernel: bool | None = None) -> None:
        assert target.nbytes == source.nbytes and target.is_contiguous() and source.is_contiguous()
        self._target, self._source = target, source
        self.way, self._call = _choose(target, source, by_kernel)

    def queue(self) -> None:
        """Queue the copy on the current stream. On CUDA the target's device must be the current one."""
        if self._call is None:
            self._target.copy_(self._source, non_blocking=True)
        else:
            self._call()


class DriverCall:
    """A call of the CUDA driver that queues something, its arguments made once. Queues it on the current stream.

    Args:
        function: of the driver.
        arguments: as ctypes takes them; they keep alive what they point to.
        stream: one of them.
        device_index: of the current device.
    """

    def __init__(
        self, function: Any, arguments: tuple[Any, ...], stream: ctypes.c_void_p, device_index: int
    ) -> None:
        self._function, self._arguments = function, arguments
        self._stream_argument, self._stream = stream, stream.value or 0
        self._device_index = device_index

    def __call__(self) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self._device_index)
        if stream != self._stream:
            self._stream = self._stream_argument.value = stream
        status = self._function(*self._arguments)
        if status != 0:
            raise RuntimeError(f"the CUDA driver refused {self._function.__name__}: error {status}.")


def _choose(
    target: torch.Tensor, source: torch.Tensor, by_kernel: bool | None
) -> tuple[str, DriverCall | None]:
    """Return the way, and the driver's call (None: torch copies)."""
    library = driver() if target.is_cuda and source.is_pinned() else None
    if library is None:
        return "torch", None
    device_index, num_bytes = target.get_device(), source.nbytes
    if by_kernel is None:
        by_kernel = num_bytes > _FEW_BYTES
    if by_kernel and _is_in_words(target.data_ptr(), source.data_ptr(), num_bytes):
        function, host = load_kernel(_SOURCE, "upload", target.device), device_address(source, target.device)
        if function is not None and host is not None:
            num_words = num_bytes // WORD_BYTES
            grid = -(-num_words // _THREADS)
            values = (target.data_ptr(), host, num_words)
            return "kernel", kernel_call(function, grid, _THREADS, values, device_index)
    stream = ctypes.c_void_p(0)
    ends = ctypes.c_uint64(target.data_ptr()), ctypes.c_void_p(source.data_ptr())
    arguments = (*ends, ctypes.c_size_t(num_bytes), stream)
    return "copy", DriverCall(library.cuMemcpyHtoDAsync_v2, arguments, stream, device_index)


@cache
def driver() -> ctypes.CDLL | None:
    """The driver's library, where there is one."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _is_in_words(*numbers: int) -> bool:
    return all(number > 0 and number % WORD_BYTES == 0 for number in numbers)


@cache
def load_kernel(source: Path, name: str, device: torch.device) -> int | None:
    """Return the handle of a kernel for `device`, or None where it cannot be had."""
    if not nvrtc.is_available():
        return None
    try:
        with torch.cuda.device(device):
            return int(nvrtc.load_function(source, name, (), 0, device))
    except RuntimeError:  # an NVRTC older than the device, say: the copy engine serves all
        return None


def device_address(host: torch.Tensor, device: torch.device) -> int | None:
    """Return the address by which kernels of `device` reach pinned memory, if they can, in whole words."""
    library, address = driver(), ctypes.c_uint64()
    if library is None:
        return None
    with torch.cuda.device(device):
        status = library.cuPointerGetAttribute(
            ctypes.byref(address), _DEVICE_POINTER, ctypes.c_uint64(host.data_ptr())
        )
    return address.value if status == 0 and _is_in_words(address.value) else None


@cache
def _parameters_type(count: int) -> type[ctypes.Structure]:
    """What a kernel with so many parameters of eight bytes takes: the values, and where each of them lies."""
    fields = (("values", ctypes.c_uint64 * count), ("addresses", ctypes.c_void_p * count))
    return type("_Parameters", (ctypes.Structure,), {"_fields_": fields})


def kernel_call(
    function: int, grid: int, threads: int, values: Sequence[int], device_index: int
) -> DriverCall:
    """Return the launch of a kernel whose parameters are these, of eight bytes each."""
    library, stream = driver(), ctypes.c_void_p(0)
    assert library is not None, "a kernel was loaded without the driver"
    arguments = launch_arguments(function, grid, threads, values, stream)
    return DriverCall(library.cuLaunchKernel, arguments, stream, device_index)


def launch_arguments(
    function: int, grid: int, threads: int, values: Sequence[int], stream: ctypes.c_void_p
) -> tuple[Any, ...]:
    """Return the arguments of `cuLaunchKernel`. They keep the kernel's own parameters alive."""
    parameters: Any = _parameters_type(len(values))()
    parameters.values[:] = values
    parameters.addresses[:] = [ctypes.addressof(parameters) + 8 * index for index in range(len(values))]
    shape = (grid, 1, 1, threads, 1, 1, 0)
    return (ctypes.c_void_p(function), *shape, stream, parameters.addresses, ctypes.c_void_p())
