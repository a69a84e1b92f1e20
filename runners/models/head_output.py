"""Lets a model's head write its logits where the caller wants them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn


@runtime_checkable
class WritesLogits(Protocol):
    """A module whose calls write their logits to `logits_out`, `[num_rows, vocab_size]`, where they fit it."""

    logits_out: torch.Tensor | None


def output_head(model: Any) -> nn.Module | None:
    """Return the module that makes a model's logits (it may be the model), or None if it names none."""
    if isinstance(model, nn.Module) and isinstance(model, WritesLogits):
        return model
    embeddings = getattr(model, "get_output_embeddings", None)
    head: nn.Module | None = None if embeddings is None else embeddings()
    return head


@contextmanager
def head_writes_to(head: nn.Module | None, output: torch.Tensor) -> Iterator[None]:
    """Let calls of `head` in the block write their result to `output`, `[num_rows, vocab_size]`.

    A graph that makes its own logits and copies them holds them twice: 74 MiB more for 256 requests and
    a vocabulary of 152 thousand. Only for a plain `nn.Linear` without a bias or a `WritesLogits`, and only
    for calls that fit `output`; any other makes a tensor of its own, which is then for the caller to copy.
    """
    if isinstance(head, WritesLogits):
        head.logits_out = output
        try:
            yield
        finally:
            head.logits_out = None
        return
    if type(head) is not nn.Linear or head.bias is not None or head.weight.dtype != output.dtype:
        yield
        return
    weight, shape = head.weight, output.shape

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        if (rows.shape[0], weight.shape[0]) != shape or rows.dtype != output.dtype:
            return nn.functional.linear(hidden, weight)
        # The same product as F.linear makes of two flattened dimensions, so equal to the last bit.
        torch.mm(rows, weight.t(), out=output)
        return output.view(*hidden.shape[:-1], -1)

    head.forward = forward
    try:
        yield
    finally:
        del head.forward
