"""Host buffers from which a queued copy may still read, and the copies."""

from __future__ import annotations

import ctypes
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
        self._device_index = target.get_device()
        #: The stream of the last call, and the same as it stands among the arguments.
        self._stream, self._stream_argument = 0, ctypes.c_void_p(0)
        self.way, self._call, self._arguments = _choose(target, source, self._stream_argument, by_kernel)

    def queue(self) -> None:
        """Queue the copy on the current stream. On CUDA the target's device must be the current one."""
        if self._call is None:
            self._target.copy_(self._source, non_blocking=True)
            return
        stream = torch._C._cuda_getCurrentRawStream(self._device_index)
        if stream != self._stream:
            self._stream = self._stream_argument.value = stream
        status = self._call(*self._arguments)
        if status != 0:
            raise RuntimeError(
                f"the CUDA driver refused a copy of {self._source.nbytes} bytes: error {status}."
            )


def _choose(
    target: torch.Tensor, source: torch.Tensor, stream: ctypes.c_void_p, by_kernel: bool | None
) -> tuple[str, Any, tuple[Any, ...]]:
    """Return the way, the driver's function to call (None: torch copies) and its arguments."""
    driver = _driver() if target.is_cuda and source.is_pinned() else None
    if driver is None:
        return "torch", None, ()
    addresses = target.data_ptr(), source.data_ptr()
    if by_kernel is None:
        by_kernel = source.nbytes > _FEW_BYTES
    if by_kernel and _is_in_words(*addresses, source.nbytes):
        with torch.cuda.device(target.device):
            function, host = _kernel(target.device), _device_address(driver, addresses[1])
        if function is not None and host is not None:
            arguments = _launch_arguments(function, addresses[0], host, source.nbytes, stream)
            return "kernel", driver.cuLaunchKernel, arguments
    ends = ctypes.c_uint64(addresses[0]), ctypes.c_void_p(addresses[1])
    return "copy", driver.cuMemcpyHtoDAsync_v2, (*ends, ctypes.c_size_t(source.nbytes), stream)


@cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _is_in_words(*numbers: int) -> bool:
    return all(number > 0 and number % WORD_BYTES == 0 for number in numbers)


@cache
def _kernel(device: torch.device) -> int | None:
    """Return the handle of the kernel on the current device, or None where it cannot be had."""
    if not nvrtc.is_available():
        return None
    try:
        return int(nvrtc.load_function(_SOURCE, "upload", (), 0, device))
    except RuntimeError:  # an NVRTC older than the device, say: the copy engine serves all
        return None


def _device_address(driver: ctypes.CDLL, host: int) -> int | None:
    """Return the address by which kernels of the current device read this pinned memory, if they can."""
    address = ctypes.c_uint64()
    status = driver.cuPointerGetAttribute(ctypes.byref(address), _DEVICE_POINTER, ctypes.c_uint64(host))
    return address.value if status == 0 and _is_in_words(address.value) else None


class _Parameters(ctypes.Structure):
    """What the kernel takes, target, source and words, and where each of the three lies."""

    _fields_ = (("values", ctypes.c_uint64 * 3), ("addresses", ctypes.c_void_p * 3))


def _launch_arguments(
    function: int, target: int, source: int, num_bytes: int, stream: ctypes.c_void_p
) -> tuple[Any, ...]:
    """Return the arguments of `cuLaunchKernel`. They keep the kernel's own parameters alive."""
    num_words = num_bytes // WORD_BYTES
    parameters = _Parameters((target, source, num_words))
    parameters.addresses[:] = [ctypes.addressof(parameters) + 8 * index for index in range(3)]
    grid = -(-num_words // _THREADS)
    shape = (grid, 1, 1, _THREADS, 1, 1, 0)
    return (ctypes.c_void_p(function), *shape, stream, parameters.addresses, ctypes.c_void_p())
