"""What one step of the model takes and gives back.

The names follow SGLang's and pymllm's `ForwardBatch`, so that a reader of either engine is at home.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

#: Tokens that one request contributes to a decode step. Speculative decoding would raise it.
NUM_TOKENS_PER_BS = 1


class ForwardMode(enum.Enum):
    """Which kind of step a batch is."""

    EXTEND = "extend"  #: prefill: one or more new tokens a request, whole prompts or chunks of them
    DECODE = "decode"  #: exactly `NUM_TOKENS_PER_BS` new tokens a request
    IDLE = "idle"  #: no request at all
    MIXED = "mixed"  #: reserved: prefill and decode in one step

    def is_decode_or_idle(self) -> bool:
        return self in DECODE_OR_IDLE

    def is_extend(self) -> bool:
        return self is ForwardMode.EXTEND


#: The modes of the steps that graphs are captured of.
DECODE_OR_IDLE = (ForwardMode.DECODE, ForwardMode.IDLE)


@dataclass(eq=False, slots=True)
class HostRows:
    """The inputs of a decode batch, side by side on the host, no slot negative.

    They count while the batch's fields are their views, and nobody has written to the slots or the lengths by torch.
    What is written to their memory past torch is not seen.
    """

    #: `[3, batch_size]` int64: input_ids, positions, out_cache_loc.
    wide: npt.NDArray[np.int64]
    #: `[3, batch_size]` int32: req_pool_indices, seq_lens_cpu, token_source (-1 without one).
    narrow: npt.NDArray[np.int32]
    #: The views, in the order above, up to seq_lens_cpu.
    views: tuple[torch.Tensor, ...]
    #: The view of the last row; None if no id comes from the last step.
    token_source: torch.Tensor | None

    def are_of(self, batch: ForwardBatch) -> bool:
        """Return True if every input of `batch` but its `token_source` is one of the views, as it was made."""
        input_ids, positions, out_cache_loc, req_pool_indices, seq_lens_cpu = self.views
        is_same = (
            batch.batch_size == self.wide.shape[1]
            and batch.input_ids is input_ids
            and batch.positions is positions
            and batch.out_cache_loc is out_cache_loc
            and batch.req_pool_indices is req_pool_indices
            and batch.seq_lens_cpu is seq_lens_cpu
        )
        try:
            return is_same and out_cache_loc._version == 0 == seq_lens_cpu._version
        except RuntimeError:
            # An inference tensor does not say whether it was written to. To ask it first whether it is one costs
            # more than all of this, with cold caches.
            return False


@dataclass
class ForwardBatch:
    """The inputs of one step. Tensors live on the host or on the runner's device.

    The scheduler builds them on the host; the runner copies them to static buffers (decode) or to
    the device (prefill). Tokens of different requests are packed one after the other, unpadded.
    """

    forward_mode: ForwardMode
    #: Number of requests in the step.
    batch_size: int
    #: `[num_tokens]` int64, token ids.
    input_ids: torch.Tensor
    #: `[num_tokens]` int64, position of each token in its own request.
    positions: torch.Tensor
    #: `[batch_size]` int32, row of each request in the request table (row 0 is the padding row).
    req_pool_indices: torch.Tensor
    #: `[batch_size]` int32, tokens of each request in the cache after this step.
    seq_lens: torch.Tensor
    #: `[batch_size]` int32 on the host: the same numbers, for planning without a device read.
    seq_lens_cpu: torch.Tensor
    #: Sum of `seq_lens`, known to the host.
    seq_lens_sum: int
    #: `[num_tokens]` int64, slot of the paged cache that receives each new token's key and value.
    out_cache_loc: torch.Tensor
    #: New tokens a request, host integers; None in a decode step (one token each).
    extend_seq_lens_cpu: list[int] | None = None
    #: `[batch_size]` int32, decode only: the row of the *last* step's `next_token_ids` that a request's id is
    #: taken from on the device, within the step; -1 where `input_ids` has it. None: `input_ids` has all.
    token_source: torch.Tensor | None = None
    #: Decode only: what the tensors are views of, so that the runner need not look at each.
    host_rows: HostRows | None = None

    @property
    def num_tokens(self) -> int:
        """New tokens in this step, over all requests."""
        return int(self.input_ids.shape[0])

    def to(self, device: torch.device) -> ForwardBatch:
        """Return the batch with its device tensors on `device` (`seq_lens_cpu` stays on the host)."""
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            req_pool_indices=self.req_pool_indices.to(device, non_blocking=True),
            seq_lens=self.seq_lens.to(device, non_blocking=True),
            out_cache_loc=self.out_cache_loc.to(device, non_blocking=True),
        )

    def part(self, start: int, end: int) -> ForwardBatch:
        """Return requests `[start, end)` of a decode batch; the tensors are views."""
        lengths = self.seq_lens_cpu[start:end]
        return ForwardBatch(
            forward_mode=self.forward_mode,
            batch_size=end - start,
            input_ids=self.input_ids[start:end],
            positions=self.positions[start:end],
            req_pool_indices=self.req_pool_indices[start:end],
            seq_lens=self.seq_lens[start:end],
            seq_lens_cpu=lengths,
            seq_lens_sum=int(lengths.sum()),
            out_cache_loc=self.out_cache_loc[start:end],
            token_source=None if self.token_source is None else self.token_source[start:end],
        )

    @classmethod
    def idle(cls) -> ForwardBatch:
        """A step without requests: every tensor is empty."""
        int64, int32 = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32)
        return cls(ForwardMode.IDLE, 0, int64, int64, int32, int32, int32, 0, int64)


@dataclass
class LogitsProcessorOutput:
    """What a step returns.

    A replay returns views of the graph's static output: they are valid until the next replay of
    *any* graph of the pool. `runner.copy_output=true` returns copies.
    """

    #: `[batch_size, vocab_size]` in the model's dtype: logits of the token after the last one.
    next_token_logits: torch.Tensor
    #: `[batch_size]` int64, the sampled ids, computed with the logits (inside the graph if there is one)
    #: and valid for as long; None when sampling is left to the caller.
    next_token_ids: torch.Tensor | None = None
    #: `[num_tokens, hidden_size]`, or None when not asked for.
    hidden_states: torch.Tensor | None = None
    #: `[batch_size]` int64, the same ids where the graph leaves them on the host (`runners.handover`): there once the
    #: step has run, and until `NUM_ANSWERS` - 1 further ones have. Never a copy. None where it does not leave them.
    posted_token_ids: npt.NDArray[np.int64] | None = None
