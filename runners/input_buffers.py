"""The static inputs that captured graphs read, and the only place that writes padding rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from runners.errors import RunnerError
from runners.forward_batch import ForwardBatch, ForwardMode
from runners.handover import create_handover
from runners.paged_kv import NULL_PAGE, PADDING_ROW
from runners.staging import WORD_BYTES, CopyFences

#: Copies that may be queued before `populate` has to wait for one of them.
_NUM_STAGING_BUFFERS = 8
#: The static inputs, in the order of `_layout`; lengths are taken where the host has them.
_INPUTS = ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens_cpu", "token_source")
View = TypeVar("View")
_inputs_of: Callable[[ForwardBatch], tuple[torch.Tensor | None, ...]] = attrgetter(*_INPUTS)


@dataclass(frozen=True)
class _Field:
    """One static input: where it lies in the packed buffer, and what its padding rows hold."""

    dtype: torch.dtype
    offset: int
    fill: int

    def view(self, packed: torch.Tensor, num_rows: int) -> torch.Tensor:
        return packed[self.offset : self.offset + num_rows * self.dtype.itemsize].view(self.dtype)


class _FirstRows(dict[int, View]):
    """Views of the first so many rows of something, kept: cutting one costs as much as all its step's arithmetic."""

    def __init__(self, cut: Callable[[int], View]) -> None:
        self._cut = cut

    def __missing__(self, num_rows: int) -> View:
        view = self[num_rows] = self._cut(num_rows)
        return view


class _StagingBuffer:
    """A host image of the packed buffer. Rows from `num_rows` on hold their fill."""

    def __init__(self, image: torch.Tensor, fields: dict[str, _Field], max_bs: int) -> None:
        self.packed = image
        tensors = {name: f.view(self.packed, max_bs) for name, f in fields.items()}
        for name, f in fields.items():
            tensors[name].fill_(f.fill)
        seq_lens = tensors["seq_lens"]
        self.seq_lens_cpu = _FirstRows(lambda num_rows: seq_lens[:num_rows])
        #: Name and rows of each field.
        self._columns = {name: tensors[name].numpy() for name in fields}
        #: `[3, max_bs]` each: all fields of int64, and of int32.
        self._wide, self._narrow = wide, narrow = _rows_of(self.packed, max_bs)
        self._wide_fill, self._narrow_fill = self._wide[:, -1:].copy(), self._narrow[:, -1:].copy()
        self._first_rows = _FirstRows(lambda num_rows: (wide[:, :num_rows], narrow[:, :num_rows]))
        self.num_rows = 0
        #: Whether the last batch came as it was made, on the host.
        self.is_as_made = False

    def write(self, batch: ForwardBatch) -> list[tuple[str, torch.Tensor]]:
        """Write host inputs and padding rows; return the inputs that are on the device."""
        n, stale, host_rows = batch.batch_size, self.num_rows, batch.host_rows
        if n > stale:
            self.num_rows = n  # until all of it is written
        self.is_as_made = host_rows is not None and host_rows.are_of(batch)
        if host_rows is not None and self.is_as_made:
            wide, narrow = self._first_rows[n]
            wide[...], narrow[...] = host_rows.wide, host_rows.narrow
            is_complete = batch.token_source is host_rows.token_source
            on_device = [] if is_complete else self._write_each({"token_source": batch.token_source}, n)
        else:
            on_device = self._write_each(dict(zip(self._columns, _inputs_of(batch), strict=True)), n)
        if stale > n:
            self._wide[:, n:stale], self._narrow[:, n:stale] = self._wide_fill, self._narrow_fill
        self.num_rows = n
        return on_device

    def _write_each(self, inputs: dict[str, torch.Tensor | None], n: int) -> list[tuple[str, torch.Tensor]]:
        """Write the first `n` rows of the host inputs among these; return those that are on the device."""
        on_device = []
        for name, source in inputs.items():
            if source is None:  # no token comes from the last step
                self._columns[name][:n] = -1
            elif source.is_cpu:
                _write_rows(name, self._columns[name], source.numpy(), n)
            else:
                _check_length(name, source.shape[0], n)
                on_device.append((name, source))
        return on_device


def _rows_of(packed: torch.Tensor, max_bs: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """The int64 fields and the int32 fields of a packed buffer, `[3, max_bs]` each."""
    wide, narrow = packed[: 3 * 8 * max_bs], packed[3 * 8 * max_bs : 3 * 12 * max_bs]
    return wide.view(torch.int64).view(3, max_bs).numpy(), narrow.view(torch.int32).view(3, max_bs).numpy()


class InputBuffers:
    """Static inputs for up to `max_bs` decode requests, in one packed device buffer.

    `populate` writes a batch and its padding rows to a host image, which travels in one piece (`Handover`). The
    images rotate, each under an event: one is never overwritten while what reads it is queued.

    A padding row is a valid request: token 0 at the first positions, row `PADDING_ROW` of the
    request table, length `seq_len_fill_value`, and its key and value go to the null page.

    Args:
        max_bs: rows.
        seq_len_fill_value: length of a padding row, as the attention backend declares it.
        device: where the static inputs live.

    Attributes:
        input_ids, positions, out_cache_loc: `[max_bs]` int64 on the device.
        req_pool_indices, seq_lens, token_source: `[max_bs]` int32 on the device.
    """

    def __init__(self, max_bs: int, seq_len_fill_value: int, device: torch.device) -> None:
        self.max_bs = max_bs
        self.seq_len_fill_value = seq_len_fill_value
        self._fields, num_bytes = _layout(max_bs, seq_len_fill_value)
        self.packed = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        views = {name: f.view(self.packed, max_bs) for name, f in self._fields.items()}
        self._views = views
        self.input_ids = views["input_ids"]
        self.positions = views["positions"]
        self.out_cache_loc = views["out_cache_loc"]
        self.req_pool_indices = views["req_pool_indices"]
        self.seq_lens = views["seq_lens"]
        self.token_source = views["token_source"]
        self.handover = create_handover(self.packed, _NUM_STAGING_BUFFERS, max_bs)
        self._staging = [
            _StagingBuffer(image, self._fields, max_bs) for image in self.handover.images.unbind()
        ]
        self._fences = CopyFences(_NUM_STAGING_BUFFERS, device)
        self._turn = 0
        self._static_batches: dict[int, ForwardBatch] = {}
        self.packed.copy_(self.handover.images[0])

    @property
    def seq_lens_cpu(self) -> torch.Tensor:
        """`[max_bs]` int32 on the host: lengths of the last batch written, padding rows included.

        Valid for the next `_NUM_STAGING_BUFFERS - 1` calls of `populate`.
        """
        return self.first_seq_lens_cpu(self.max_bs)

    def first_seq_lens_cpu(self, num_rows: int) -> torch.Tensor:
        """Return the first `num_rows` of `seq_lens_cpu`."""
        return self._staging[self._turn].seq_lens_cpu[num_rows]

    @property
    def fills(self) -> dict[str, int]:
        """What the padding rows of each static input hold."""
        return {name: f.fill for name, f in self._fields.items()}

    @property
    def pinned_bytes(self) -> int:
        return self.handover.pinned_bytes

    @property
    def is_as_made(self) -> bool:
        """Whether the last batch had the inputs that `decode_batch` made, and checked."""
        return self._staging[self._turn].is_as_made

    def populate(
        self, batch: ForwardBatch, graph_follows: bool = False, wants_ids: bool = False, at_once: bool = False
    ) -> None:
        """Write a decode batch to the first rows and make every other row a padding row.

        Inputs on the host travel in one piece, asynchronously; inputs on the device (token ids sampled
        there) are copied there, without a look at the host. A negative slot goes to the null page: as
        an index it would wrap round to the last page of the cache.

        Args:
            batch: the step.
            graph_follows: the next launch is that of a graph that begins with `handover.fetch`, and
                `handover.note_launch` is called then, or `take_back` if there is none. Such a graph brings the
                inputs.
            wants_ids: what that graph leaves by `handover.post` will be read.
            at_once: the inputs are needed on the device ahead of that graph.

        Raises:
            RunnerError: more requests than rows, or an input whose length is not the batch size.
        """
        n = batch.batch_size
        if n > self.max_bs:
            raise RunnerError(
                f"a batch of {n} requests does not fit the static inputs for {self.max_bs}: capture a larger "
                "size, or set runner.above_max=eager or split."
            )
        handover = self.handover
        self._turn = turn = self._fences.next_turn()
        on_device = self._staging[turn].write(batch)
        is_there = at_once or bool(on_device) or not (graph_follows and handover.is_captured)
        if is_there:
            handover.drop_doubtful()
            handover.upload(turn)
            for name, source in on_device:
                self._copy_on_device(name, source)
        if graph_follows:
            handover.hand_in(turn, wants_ids, is_there)

    def settle(self) -> None:
        """Note, after a launch, which host image it reads. A later `populate` does it otherwise."""
        self._fences.settle()

    def _copy_on_device(self, name: str, source: torch.Tensor) -> None:
        target = self._views[name][: source.shape[0]]
        if name == "out_cache_loc":
            torch.clamp(source, min=NULL_PAGE, out=target)
        else:
            target.copy_(source)

    def static_batch(self, num_rows: int) -> ForwardBatch:
        """Return the first `num_rows` rows as a decode batch of views, as a graph of that size sees it.

        Its `seq_lens_cpu` and `seq_lens_sum` are those of padding rows: plan from the arguments of
        `init_forward_metadata_replay_cuda_graph` instead.
        """
        batch = self._static_batches.get(num_rows)
        if batch is None:
            batch = self._view_batch(num_rows, self._padding_lens(num_rows))
            self._static_batches[num_rows] = batch
        return batch

    def populated_batch(self, num_rows: int, batch: ForwardBatch) -> ForwardBatch:
        """Return the first `num_rows` rows after `populate(batch)`, padding rows included, for an eager step."""
        if not batch.batch_size <= num_rows <= self.max_bs:
            raise RunnerError(
                f"a batch of {batch.batch_size} cannot be padded to {num_rows} rows: give a size between it and "
                f"{self.max_bs}."
            )
        prepared = self._view_batch(num_rows, self.first_seq_lens_cpu(num_rows))
        prepared.seq_lens_sum = batch.seq_lens_sum + (num_rows - batch.batch_size) * self.seq_len_fill_value
        if batch.token_source is None:
            prepared.token_source = None
        return prepared

    def _padding_lens(self, num_rows: int) -> torch.Tensor:
        return torch.full((num_rows,), self.seq_len_fill_value, dtype=torch.int32)

    def _view_batch(self, num_rows: int, seq_lens_cpu: torch.Tensor) -> ForwardBatch:
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=num_rows,
            input_ids=self.input_ids[:num_rows],
            positions=self.positions[:num_rows],
            req_pool_indices=self.req_pool_indices[:num_rows],
            seq_lens=self.seq_lens[:num_rows],
            seq_lens_cpu=seq_lens_cpu,
            seq_lens_sum=num_rows * self.seq_len_fill_value,
            out_cache_loc=self.out_cache_loc[:num_rows],
            token_source=self.token_source[:num_rows],
        )


def _write_rows(name: str, rows: npt.NDArray[Any], values: npt.NDArray[Any], batch_size: int) -> None:
    _check_length(name, len(values), batch_size)
    if name == "out_cache_loc":
        np.maximum(values, NULL_PAGE, out=rows[:batch_size])
    else:
        rows[:batch_size] = values


def _check_length(name: str, length: int, batch_size: int) -> None:
    # numpy would spread an array of length 1 over all rows without a word.
    if length != batch_size:
        raise RunnerError(
            f"{name} has {length} entries for a decode batch of {batch_size} requests: it needs one each."
        )


def _layout(max_bs: int, seq_len_fill_value: int) -> tuple[dict[str, _Field], int]:
    """Return the fields, three of int64 and three of int32 (`_rows_of`), and the bytes of them all, in whole words."""
    columns = [
        ("input_ids", torch.int64, 0),
        ("positions", torch.int64, max(seq_len_fill_value - 1, 0)),
        ("out_cache_loc", torch.int64, NULL_PAGE),
        ("req_pool_indices", torch.int32, PADDING_ROW),
        ("seq_lens", torch.int32, seq_len_fill_value),
        ("token_source", torch.int32, -1),
    ]
    fields, offset = {}, 0
    for name, dtype, fill in columns:
        fields[name] = _Field(dtype, offset, fill)
        offset += max_bs * dtype.itemsize
    return fields, -(-offset // WORD_BYTES) * WORD_BYTES
