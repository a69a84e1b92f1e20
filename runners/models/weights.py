"""How large a model's weights are, and how much of them a decode step reads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

_BLOCK_BYTES = 1 << 22


def count_parameters(model: nn.Module) -> int:
    """Number of parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def weight_bytes(model: nn.Module) -> int:
    """Bytes of storage behind parameters and buffers; storage that is shared counts once.

    Call it before the KV cache is bound: its tensors become buffers of the attention layers.
    """
    tensors = (*model.parameters(), *model.buffers())
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def unread_embedding_bytes(embedding: nn.Embedding, head: nn.Linear) -> int:
    """Bytes of the input embedding that a decode step leaves alone, before the rows it looks up.

    An untied table is read a row a token; a tied one is read whole, by the output head.
    """
    return 0 if embedding.weight is head.weight else embedding.weight.nbytes


def fingerprint(files: list[Path]) -> str:
    """SHA-256 over names and content of the files, for folders that have no commit."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.name.encode())
        for block in _blocks(path):
            digest.update(block)
    return digest.hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            yield block


def parse_dtype(name: str, default: torch.dtype) -> torch.dtype:
    """Return the torch dtype called `name`; `auto` gives `default`. Raises ValueError otherwise."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name == "auto":
        return default
    if name not in known:
        raise ValueError(f"dtype={name}: choose one of auto, {', '.join(known)}.")
    return known[name]
