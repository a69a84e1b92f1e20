"""Reads the file of an offline W&B run, to see whether W&B really wrote it to the end.

A `.wandb` file is a header (`:W&B`, magic, version) and then blocks of 32 KiB of LevelDB log frames:
checksum, length, kind and a piece of a serialised `wandb.proto.wandb_internal_pb2.Record`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER_BYTES = struct.calcsize("<4sHB")
_FRAME = struct.Struct("<IHB")
_BLOCK_BYTES = 32768
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_records(path: Path) -> Iterator[Any]:
    """Yield the protobuf records of an offline run; stops at a torn tail.

    Nothing comes from a file without W&B's header, as one is that was never written to.
    """
    from wandb.proto import wandb_internal_pb2

    protocol: Any = wandb_internal_pb2
    for message in _messages(path.read_bytes()):
        yield protocol.Record.FromString(message)


def is_complete(path: Path) -> bool:
    """Tell whether the run's last record, its exit code, is in the file."""
    return any(record.WhichOneof("record_type") == "exit" for record in read_records(path))


def _messages(content: bytes) -> Iterator[bytes]:
    pieces: list[bytes] = []
    for kind, piece in _frames(content):
        if kind in (_FULL, _FIRST):
            pieces = []
        pieces.append(piece)
        if kind in (_FULL, _LAST):
            yield b"".join(pieces)


def _frames(content: bytes) -> Iterator[tuple[int, bytes]]:
    if content[:4] != b":W&B":
        return
    at = _HEADER_BYTES
    while True:
        left_in_block = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left_in_block < _FRAME.size:  # too little for a frame: zeros up to the next block
            at += left_in_block
        if at + _FRAME.size > len(content):
            return
        _, length, kind = _FRAME.unpack_from(content, at)
        at += _FRAME.size
        if not _FULL <= kind <= _LAST or at + length > len(content):
            return
        yield kind, content[at : at + length]
        at += length
