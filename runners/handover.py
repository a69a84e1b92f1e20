"""What the host and a step's graph hand to each other: the inputs, and the token ids that were sampled from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from runners.models.fused import nvrtc
from runners.staging import WORD_BYTES, Upload, device_address, kernel_call, load_kernel

_SOURCE = Path(nvrtc.__file__).parent / "kernels" / "handover.cu"
#: Images that the kernel looks through: a ticket for each lane of a warp.
MAX_DEPTH = 32
#: Threads of a CTA, at most.
_MAX_THREADS = 1024
#: Steps until the memory of a step's ids is used again.
NUM_ANSWERS = 8


class Handover(ABC):
    """Images of a step's inputs, written by the host in turn, and what brings them to the device.

    The host writes an image and hands it in; `fetch`, captured as the first thing of a graph, brings the
    oldest one that was handed in and not fetched yet. So the launch of the graph is all that the host asks of
    the driver, and steps may be queued behind each other. `post`, captured as the last thing, leaves the ids in
    pinned memory. A graph that is replayed without an image finds the target as the step before left it.

    Args:
        target: contiguous, where the inputs are read.
        depth: images. Who writes them sees that one is not written before it was fetched (`CopyFences`).
        num_ids: the most ids that a step samples.

    Attributes:
        images: `[depth, target.nbytes]` uint8 on the host.
    """

    #: `kernel`; `copy`, by the driver, in no graph; or `torch`, the plain twin.
    way: Literal["kernel", "copy", "torch"]
    #: Whether a graph can fetch and post by itself.
    is_captured = True

    def __init__(self, target: torch.Tensor, depth: int, num_ids: int) -> None:
        assert depth <= MAX_DEPTH and target.is_contiguous()
        self._target = target
        is_pinned = target.is_cuda
        self.images = torch.zeros(depth, target.nbytes, dtype=torch.uint8, pin_memory=is_pinned)
        #: `[depth, 2]`: the number of each image, ascending from step to step, 0 for none; and where its ids go.
        self._tickets = torch.zeros(depth, 2, dtype=torch.int64, pin_memory=is_pinned)
        self._answers = torch.zeros(NUM_ANSWERS, num_ids, dtype=torch.int64, pin_memory=is_pinned)
        # Plain memory: the shortest way from Python to a number of the tensor.
        self._numbers: memoryview[int] = self._tickets.view(-1).numpy().data
        self._ids: list[npt.NDArray[np.int64]] = list(self._answers.numpy())
        self._number = 0
        self._answer = -1
        #: The turn that was handed in and for which nothing was launched yet.
        self._open: int | None = None

    @property
    def pinned_bytes(self) -> int:
        return sum(t.nbytes for t in (self.images, self._tickets, self._answers) if t.is_pinned())

    def hand_in(self, turn: int, wants_ids: bool = False) -> None:
        """Hand in the image of `turn`. One that was handed in before and not launched for is taken back."""
        numbers = self._numbers
        if self._open is not None:
            numbers[2 * self._open] = 0
        answer = -1
        if wants_ids:
            answer = self._answer = (self._answer + 1) % NUM_ANSWERS
        self._number += 1
        numbers[2 * turn + 1] = answer
        # Last: with its number the rest of it counts.
        numbers[2 * turn] = self._number
        self._open = turn

    def note_launch(self) -> None:
        """What was handed in last has a launch, queued by now, that fetches it."""
        self._open = None

    def answer(self, num_ids: int) -> npt.NDArray[np.int64]:
        """Return the first ids of the last step that wanted them: there once it has run, for `NUM_ANSWERS` - 1 more."""
        return self._ids[self._answer][:num_ids]

    @abstractmethod
    def fetch(self) -> None:
        """Queue, on the current stream, what brings the image handed in and not fetched yet, if there is one."""

    @abstractmethod
    def post(self, ids: torch.Tensor) -> None:
        """Queue what leaves `ids`, `[n]` int64, where the step fetched last wants them, once."""


class _NoKernelsError(Exception):
    """The kernels cannot be had on this device, or do not reach the memory."""


class KernelHandover(Handover):
    """By two kernels. `_NoKernelsError` where that is not possible."""

    way = "kernel"

    def __init__(self, target: torch.Tensor, depth: int, num_ids: int) -> None:
        super().__init__(target, depth, num_ids)
        device, index = target.device, target.get_device()
        #: The number of the image fetched last, its turn, and where its ids go.
        self._state = torch.tensor([0, -1, -1], dtype=torch.int64, device=device)
        tensors = (self.images, self._tickets, self._answers)
        kernels = [load_kernel(_SOURCE, name, device) for name in ("fetch_inputs", "post_ids")]
        hosts = [device_address(tensor, device) for tensor in tensors]
        found = [number for number in (*kernels, *hosts) if number is not None]
        if (
            len(found) < len(kernels) + len(hosts)
            or target.data_ptr() % WORD_BYTES
            or target.nbytes % WORD_BYTES
        ):
            raise _NoKernelsError
        fetch, self._post, images, tickets, self._posted = found
        num_words = target.nbytes // WORD_BYTES
        values = (target.data_ptr(), images, tickets, self._state.data_ptr(), num_words, depth)
        self._fetch = kernel_call(fetch, 1, _threads(num_words), values, index)

    def fetch(self) -> None:
        self._fetch()

    def post(self, ids: torch.Tensor) -> None:
        num_ids, stride = len(ids), self._answers.shape[1]
        values = (self._posted, ids.data_ptr(), self._state.data_ptr(), num_ids, stride)
        kernel_call(self._post, 1, _threads(num_ids), values, self._target.get_device())()


def _threads(count: int) -> int:
    """Threads of a CTA for so many things: whole warps."""
    return min(_MAX_THREADS, -(-count // 32) * 32)


class CopyHandover(Handover):
    """By the driver's copy: for a CUDA device without the kernels. `fetch` brings what was handed in last."""

    way = "copy"
    is_captured = False

    def __init__(self, target: torch.Tensor, depth: int, num_ids: int) -> None:
        super().__init__(target, depth, num_ids)
        self._uploads = [Upload(target, image) for image in self.images.unbind()]

    def fetch(self) -> None:
        if self._open is not None:
            self._uploads[self._open].queue()

    def post(self, ids: torch.Tensor) -> None:
        """Nothing: the ids stay on the device."""


class TorchHandover(Handover):
    """The plain twin, on the host."""

    way = "torch"

    def __init__(self, target: torch.Tensor, depth: int, num_ids: int) -> None:
        super().__init__(target, depth, num_ids)
        self._fetched = 0
        self._wanted = -1

    def fetch(self) -> None:
        tickets = self._tickets.tolist()
        newer = [(number, turn) for turn, (number, _) in enumerate(tickets) if number > self._fetched]
        if newer:
            self._fetched, turn = min(newer)
            self._wanted = tickets[turn][1]
            self._target.copy_(self.images[turn])

    def post(self, ids: torch.Tensor) -> None:
        if self._wanted >= 0:
            self._answers[self._wanted, : len(ids)] = ids
        self._wanted = -1


def create_handover(target: torch.Tensor, depth: int, num_ids: int) -> Handover:
    """Return the handover to `target`: by kernels where they can be had."""
    if not target.is_cuda:
        return TorchHandover(target, depth, num_ids)
    try:
        return KernelHandover(target, depth, num_ids)
    except _NoKernelsError:
        return CopyHandover(target, depth, num_ids)
