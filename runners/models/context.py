"""Which backend and batch the attention layers are running for.

A model's layers cannot be handed these as arguments: transformers' signatures are fixed, and
torch.compile would guard on them. So the runner sets them around the model's call, and the custom
operator of `attention_op` looks them up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from runners.attention.base import AttentionBackend
from runners.forward_batch import ForwardBatch


@dataclass(frozen=True)
class ForwardContext:
    """The step in progress."""

    backend: AttentionBackend
    batch: ForwardBatch
    #: `[>= batch_size]` int64: the ids that the last step sampled, and after this step its own.
    token_ids: torch.Tensor | None = None
    #: A model that finds the largest logits by itself writes their ids to `token_ids`.
    greedy: bool = False


_current: ForwardContext | None = None


@contextmanager
def forward_context(
    backend: AttentionBackend,
    batch: ForwardBatch,
    token_ids: torch.Tensor | None = None,
    greedy: bool = False,
) -> Iterator[None]:
    """Run the body's attention layers on `backend`, for `batch`. The previous context comes back."""
    global _current
    previous = _current
    _current = ForwardContext(backend, batch, token_ids, greedy)
    try:
        yield
    finally:
        _current = previous


def current_context() -> ForwardContext:
    """Return the step in progress. Asserts that there is one: the model only runs inside a runner."""
    assert _current is not None, "the model was called outside forward_context()"
    return _current


_num_eager_layers = 0


def count_eager_layer() -> None:
    """Note that an attention layer runs as plain Python, not as compiled code."""
    global _num_eager_layers
    _num_eager_layers += 1


def num_eager_layers() -> int:
    """Return how many times a layer of this process ran as plain Python so far."""
    return _num_eager_layers
