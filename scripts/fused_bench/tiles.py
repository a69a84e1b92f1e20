"""Attention tiles worth timing."""

from __future__ import annotations

from runners.attention.triton_backend import AttentionTile


def attention_tiles(bs: int) -> list[AttentionTile]:
    """The tiles for a batch size of the benchmark."""
    if bs == 1:
        return [AttentionTile(*t) for t in ((8, 64, 4, 2), (16, 32, 4, 2), (32, 16, 4, 2), (8, 64, 8, 2))]
    if bs == 8:
        return [
            AttentionTile(*t)
            for t in ((8, 64, 4, 2), (8, 64, 8, 2), (4, 64, 4, 2, 64), (4, 128, 8, 2), (2, 64, 4, 2, 128),
                      (2, 128, 8, 2, 128), (16, 32, 4, 2))
        ]  # fmt: skip
    if bs == 32:
        return [
            AttentionTile(*t)
            for t in ((1, 128, 8, 2), (1, 128, 8, 3), (1, 64, 4, 3), (1, 64, 4, 3, 64), (1, 64, 4, 4, 64),
                      (2, 64, 4, 2), (2, 64, 4, 3), (2, 64, 4, 3, 64), (2, 128, 8, 2), (2, 128, 8, 2, 128),
                      (4, 64, 4, 2), (4, 128, 8, 2))
        ]  # fmt: skip
    return [
        AttentionTile(*t)
        for t in ((1, 64, 4, 2), (1, 64, 4, 3), (1, 64, 4, 4), (1, 32, 4, 3), (1, 32, 2, 3), (1, 64, 2, 3),
                  (1, 128, 8, 2), (1, 128, 8, 3), (1, 128, 4, 2), (1, 64, 4, 3, 64))
    ]  # fmt: skip
