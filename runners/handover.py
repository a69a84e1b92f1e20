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
#: What a ticket says, beside the number of its answer (0 for none): its image is in the target already.
_IS_THERE = 1 << 32


class Handover(ABC):
    """Images of a step's inputs, written by the host in turn, and what brings them to the device.

    The host writes an image and hands in a ticket for it; `fetch`, captured as the first thing of a graph, takes the
    oldest ticket that was not taken yet and brings its image. So the launch of the graph is all that the host asks
    of the driver, and steps may be queued behind each other. `post`, captured as the last thing, leaves the ids
    in pinned memory. Where inputs are needed ahead of the graph, `upload` brings them, and the ticket says so.

    HAZARD: each launch of a graph that fetches takes a ticket. One without a ticket of its own takes that of the
    step after it, if the host is that far ahead; if not, it finds the target as it is.

    Args:
        target: contiguous, where the inputs are read.
        depth: images. Who writes them sees that one is not written before it was fetched (`CopyFences`).
        num_ids: the most ids that a step samples.

    Attributes:
        images: `[depth, target.nbytes]` uint8 on the host.
    """

    #: `kernel`; `copy`, without a graph's doing; or `torch`, the plain twin.
    way: Literal["kernel", "copy", "torch"]
    #: Whether a graph can fetch and post by itself.
    is_captured = True

    def __init__(self, target: torch.Tensor, depth: int, num_ids: int) -> None:
        assert depth <= MAX_DEPTH and target.is_contiguous()
        self._target = target
        is_pinned = target.is_cuda
        self.images = torch.zeros(depth, target.nbytes, dtype=torch.uint8, pin_memory=is_pinned)
        #: `[depth, 2]`: the number of each ticket, ascending from step to step, 0 for none; and what else it says.
        self._tickets = torch.zeros(depth, 2, dtype=torch.int64, pin_memory=is_pinned)
        self._answers = torch.zeros(NUM_ANSWERS, num_ids, dtype=torch.int64, pin_memory=is_pinned)
        # Plain memory: the shortest way from Python to a number of the tensor.
        self._numbers: memoryview[int] = self._tickets.view(-1).numpy().data
        self._ids: list[npt.NDArray[np.int64]] = list(self._answers.numpy())
        self._number = 0
        self._answer = -1
        #: The turn of a ticket for which nothing was launched yet.
        self._open: int | None = None

    @property
    def pinned_bytes(self) -> int:
        return sum(t.nbytes for t in (self.images, self._tickets, self._answers) if t.is_pinned())

    def hand_in(self, turn: int, wants_ids: bool = False, is_there: bool = False) -> None:
        """Hand in a ticket for the image of `turn`: a launch of a graph that fetches is to follow.

        If no launch was noted for the ticket before, its step was given up, or it failed at any point: then this
        waits for what is queued, and what is left of that ticket counts no longer.

        Args:
            turn: which image.
            wants_ids: the ids of the step are to be posted.
            is_there: the image was uploaded already.
        """
        self.drop_doubtful()
        content = _IS_THERE if is_there else 0
        if wants_ids:
            content += 1 + (self._answer + 1) % NUM_ANSWERS
        self._number += 1
        self._numbers[2 * turn + 1] = content
        # Last: with its number the rest of it counts.
        self._numbers[2 * turn] = self._number
        self._open = turn

    def note_launch(self) -> None:
        """The launch for the ticket handed in last was queued: an answer that it wants is the last one from now on."""
        if self._open is not None:
            wanted = self._numbers[2 * self._open + 1] % _IS_THERE
            if wanted:
                self._answer = wanted - 1
            self._open = None

    def take_back(self) -> None:
        """Take back the ticket handed in last, for which nothing was launched."""
        if self._open is not None:
            self._numbers[2 * self._open] = 0
            self._open = None

    def drop_doubtful(self) -> None:
        """Drop a ticket of which it is not known whether a launch has been queued that takes it."""
        if self._open is not None:
            self._wait()
            self.take_back()

    @abstractmethod
    def _wait(self) -> None:
        """Wait until what is queued has taken its tickets."""

    def answer(self, num_ids: int) -> npt.NDArray[np.int64]:
        """Return the first ids of the last step launched that wanted them.

        They are there once it has run, and for `NUM_ANSWERS` - 1 further ones.
        """
        return self._ids[self._answer][:num_ids]

    @abstractmethod
    def upload(self, turn: int) -> None:
        """Queue, on the current stream, what brings the image of `turn`, whatever the tickets say."""

    @abstractmethod
    def fetch(self) -> None:
        """Queue what takes the next ticket, if there is one, and brings its image."""

    @abstractmethod
    def post(self, ids: torch.Tensor) -> None:
        """Queue what leaves `ids`, `[n]` int64, where the ticket taken last wants them, once."""


class _NoKernelsError(Exception):
    """The kernels cannot be had on this device, or do not reach the memory."""


class _DeviceHandover(Handover):
    def __init__(self, target: torch.Tensor, depth: int, num_ids: int) -> None:
        super().__init__(target, depth, num_ids)
        self._uploads = [Upload(target, image) for image in self.images.unbind()]

    def upload(self, turn: int) -> None:
        self._uploads[turn].queue()

    def _wait(self) -> None:
        torch.cuda.current_stream(self._target.device).synchronize()


class KernelHandover(_DeviceHandover):
    """By two kernels. `_NoKernelsError` where that is not possible."""

    way = "kernel"

    def __init__(self, target: torch.Tensor, depth: int, num_ids: int) -> None:
        super().__init__(target, depth, num_ids)
        device = target.device
        #: The number of the ticket taken last, its turn, and where its ids go.
        self._state = torch.tensor([0, -1, -1], dtype=torch.int64, device=device)
        kernels = [load_kernel(_SOURCE, name, device) for name in ("fetch_inputs", "post_ids")]
        tensors = (self.images, self._tickets, self._answers)
        hosts = [device_address(tensor, device) for tensor in tensors]
        found = [number for number in (*kernels, *hosts) if number is not None]
        is_in_words = target.data_ptr() % WORD_BYTES == 0 == target.nbytes % WORD_BYTES
        if len(found) < len(kernels) + len(hosts) or not is_in_words:
            raise _NoKernelsError
        fetch, self._post, images, tickets, self._posted = found
        num_words = target.nbytes // WORD_BYTES
        values = (target.data_ptr(), images, tickets, self._state.data_ptr(), num_words, depth)
        self._fetch = kernel_call(fetch, 1, _threads(num_words), values, target.get_device())

    def fetch(self) -> None:
        self._fetch()

    def post(self, ids: torch.Tensor) -> None:
        num_ids, stride = len(ids), self._answers.shape[1]
        values = (self._posted, ids.data_ptr(), self._state.data_ptr(), num_ids, stride)
        kernel_call(self._post, 1, _threads(num_ids), values, self._target.get_device())()


def _threads(count: int) -> int:
    """Threads of a CTA for so many things: whole warps."""
    return min(_MAX_THREADS, -(-count // 32) * 32)


class CopyHandover(_DeviceHandover):
    """For a CUDA device without the kernels: only `upload` does anything, and ids stay on the device."""

    way = "copy"
    is_captured = False

    def fetch(self) -> None:
        """Nothing: no graph fetches."""

    def post(self, ids: torch.Tensor) -> None:
        """Nothing."""


class TorchHandover(Handover):
    """The plain twin, on the host."""

    way = "torch"

    def __init__(self, target: torch.Tensor, depth: int, num_ids: int) -> None:
        super().__init__(target, depth, num_ids)
        self._taken = 0
        self._wanted = -1

    def upload(self, turn: int) -> None:
        self._target.copy_(self.images[turn])

    def _wait(self) -> None:
        """Nothing is queued on the host."""

    def fetch(self) -> None:
        tickets = self._tickets.tolist()
        newer = [(number, turn) for turn, (number, _) in enumerate(tickets) if number > self._taken]
        if not newer:
            return
        self._taken, turn = min(newer)
        is_there, answer = divmod(tickets[turn][1], _IS_THERE)
        self._wanted = answer - 1
        if not is_there:
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
