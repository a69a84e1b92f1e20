"""Requests of known length, prefilled and held in the cache, that parity and the size sweep decode."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

from harness.errors import ConfigError
from runners.batches import decode_batch, extend_batch

if TYPE_CHECKING:
    from runners.forward_batch import ForwardBatch
    from runners.model_runner import ModelRunner


class ProbeRequests:
    """Holds one request per entry of `lengths`: its tokens in the cache once the next step has run.

    The prompts are random ids from `seed` and are really prefilled, so that a decode step attends
    to keys and values of real magnitude. A decode step may be repeated: it writes the same slot.
    """

    def __init__(self, runner: ModelRunner, lengths: Sequence[int], seed: int) -> None:
        self._runner = runner
        self._lengths = np.asarray(lengths, dtype=np.int32)
        self._rows = np.empty(len(lengths), dtype=np.int32)
        self._num_rows = 0
        generator = np.random.default_rng(seed)
        self._prompts = [generator.integers(0, runner.vocab_size, n, dtype=np.int64) for n in self._lengths]
        try:
            self._allocate()
            self._prefill()
        except BaseException:
            self.close()
            raise

    def _allocate(self) -> None:
        kv = self._runner.kv
        for index, length in enumerate(self._lengths.tolist()):
            self._rows[index] = kv.add_request()
            self._num_rows = index + 1
            if not kv.extend(int(self._rows[index]), length):
                raise ConfigError(
                    "attention.num_pages",
                    str(kv.pool.num_pages),
                    f"{len(self._lengths)} requests of up to {max(self._lengths)} tokens do not fit; raise "
                    "attention.num_pages or lower measure.context_lens or measure.batch_sizes",
                )

    def _prefill(self) -> None:
        """Run everything but the last token of each prompt through the model, in full chunks."""
        budget = self._runner.config.prefill_chunk_tokens
        chunk: list[tuple[int, int, np.ndarray]] = []
        room = budget
        for row, prompt in zip(self._rows.tolist(), self._prompts, strict=True):
            start, end = 0, len(prompt) - 1
            while start < end:
                stop = min(end, start + room)
                chunk.append((row, start, prompt[start:stop]))
                room -= stop - start
                start = stop
                if room == 0:
                    self._run_chunk(chunk)
                    chunk, room = [], budget
        self._run_chunk(chunk)

    def _run_chunk(self, chunk: list[tuple[int, int, np.ndarray]]) -> None:
        if chunk:
            rows, starts, token_ids = zip(*chunk, strict=True)
            self._runner.forward(extend_batch(self._runner.kv, rows, starts, token_ids))

    def decode_batch(self, batch_size: int) -> ForwardBatch:
        """Return the decode step of the first `batch_size` requests."""
        return self.decode_of(range(batch_size))

    def decode_of(self, indices: Sequence[int]) -> ForwardBatch:
        """Return the decode step of some of the requests, in the order given."""
        at = np.array(indices, dtype=np.int64)
        last = np.array([self._prompts[index][-1] for index in indices], dtype=np.int64)
        return decode_batch(self._runner.kv, self._rows[at], self._lengths[at], last)

    def close(self) -> None:
        """Give rows and pages back."""
        for row in self._rows[: self._num_rows].tolist():
            self._runner.kv.release(row)
        self._num_rows = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
