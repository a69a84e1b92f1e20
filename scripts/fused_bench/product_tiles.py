"""Product tiles worth timing beside those of the shipped table: most by the streamed kernel."""

from __future__ import annotations

from collections.abc import Iterator

from runners.models.fused.recipe import Recipe
from runners.models.fused.skinny_gemm import Product, Tile

#: Block of outputs, of the inner dimension, splits, warps, stages, columns prefetched, swapped.
_Shape = tuple[int, int, int, int, int, int, bool]

#: Weights below this can be in flight as a whole ahead of the wait.
_SMALL_BYTES = 20 << 20

_LARGE: dict[str, list[_Shape]] = {
    "qkv": [
        (64, 128, 1, 4, 4, 0, False), (64, 128, 1, 4, 6, 0, False), (64, 128, 1, 4, 4, 512, False),
        (32, 128, 1, 4, 4, 0, False), (32, 256, 1, 4, 4, 0, False), (64, 128, 1, 4, 5, 0, True),
        (64, 128, 2, 4, 4, 0, False), (64, 256, 1, 8, 4, 0, False),
    ],
    "gate_up": [
        (32, 128, 1, 4, 4, 0, False), (32, 128, 1, 4, 3, 0, False), (32, 64, 1, 4, 6, 0, False),
        (32, 128, 1, 4, 4, 256, False), (64, 128, 1, 4, 3, 0, True), (64, 64, 1, 4, 5, 0, True),
        (64, 128, 1, 8, 3, 0, False), (32, 256, 1, 8, 3, 0, False),
    ],
    "output": [
        (64, 128, 4, 4, 4, 0, False), (64, 128, 4, 4, 4, 0, True), (64, 128, 2, 4, 6, 0, False),
        (32, 256, 1, 4, 5, 0, False), (32, 128, 2, 4, 6, 0, False), (64, 128, 4, 4, 4, 512, False),
        (64, 128, 2, 4, 5, 1024, True), (32, 256, 2, 4, 4, 512, False), (64, 256, 4, 8, 3, 0, False),
    ],
    "down": [
        (64, 128, 4, 4, 4, 0, False), (64, 128, 4, 4, 4, 0, True), (64, 128, 2, 4, 6, 0, False),
        (32, 256, 1, 4, 5, 0, False), (32, 256, 1, 4, 6, 512, False), (32, 128, 2, 4, 6, 0, False),
        (64, 128, 4, 4, 4, 512, False), (32, 512, 1, 8, 4, 0, False), (64, 256, 2, 8, 4, 0, False),
    ],
    "head": [(64, 128, 1, 4, 4, 0, True), (64, 128, 1, 4, 4, 0, False), (128, 128, 1, 4, 3, 0, True)],
}  # fmt: skip
_SMALL: dict[str, list[_Shape]] = {
    "qkv": [
        (64, 512, 2, 8, 2, 0, False), (64, 512, 2, 4, 2, 0, False), (32, 512, 2, 4, 2, 0, False),
        (32, 512, 1, 4, 3, 0, False), (32, 256, 1, 4, 5, 0, False),
        (64, 256, 4, 4, 2, 0, False), (64, 256, 2, 4, 3, 0, False), (32, 1024, 1, 8, 2, 0, False),
    ],
    "gate_up": [
        (64, 512, 2, 8, 2, 0, False), (32, 512, 2, 8, 2, 0, False), (64, 256, 4, 8, 2, 0, False),
        (32, 256, 4, 4, 2, 0, False), (32, 256, 2, 4, 2, 0, False), (32, 512, 1, 8, 3, 0, False),
        (32, 256, 2, 4, 3, 0, False), (32, 256, 1, 4, 4, 0, False),
    ],
    "output": [
        (32, 512, 4, 4, 2, 0, False), (16, 1024, 2, 4, 2, 0, False), (64, 256, 8, 4, 2, 0, False),
        (32, 256, 8, 4, 2, 0, False), (32, 256, 4, 4, 3, 0, False), (64, 512, 4, 8, 2, 0, False),
        (16, 512, 4, 4, 2, 0, False), (16, 512, 2, 4, 3, 0, False),
    ],
    "down": [
        (32, 512, 6, 4, 2, 0, False), (64, 512, 6, 8, 2, 0, False), (32, 1024, 3, 8, 2, 0, False),
        (64, 256, 12, 4, 2, 0, False), (32, 256, 6, 4, 3, 0, False), (32, 256, 4, 4, 4, 0, False),
        (16, 1024, 3, 4, 2, 0, False), (16, 512, 6, 4, 2, 0, False),
    ],
    "head": [
        (64, 128, 1, 4, 3, 0, True), (64, 128, 1, 4, 4, 0, False), (128, 128, 1, 4, 3, 0, True),
        (32, 256, 1, 4, 4, 0, False),
    ],
}  # fmt: skip
#: At many rows, with the block of rows first; the last says whether by the streamed kernel.
_MANY: dict[str, list[tuple[int, int, int, int, int, int, bool, bool]]] = {
    "qkv": [
        (64, 64, 128, 1, 4, 4, False, True), (64, 64, 64, 1, 4, 6, False, True), (64, 64, 256, 1, 8, 3, False, True),
        (64, 64, 128, 1, 4, 4, False, False), (64, 64, 128, 1, 8, 4, False, True), (128, 32, 128, 1, 8, 4, False, True),
        (128, 64, 128, 1, 8, 4, True, True), (128, 64, 64, 1, 8, 5, False, False),
    ],
    "gate_up": [
        (64, 32, 128, 1, 8, 4, False, True), (64, 32, 256, 1, 8, 3, False, True), (64, 64, 64, 1, 4, 5, False, True),
        (64, 64, 128, 1, 8, 4, False, True), (64, 64, 64, 1, 4, 5, False, False), (64, 32, 128, 1, 4, 4, False, False),
        (128, 64, 64, 1, 8, 4, False, False), (128, 32, 64, 1, 8, 5, False, True), (64, 64, 128, 1, 4, 3, True, True),
    ],
    "output": [
        (64, 64, 128, 4, 4, 4, False, True), (64, 32, 128, 2, 4, 5, False, True), (64, 32, 256, 4, 4, 3, False, True),
        (64, 64, 128, 4, 4, 4, False, False), (64, 32, 128, 4, 4, 5, False, True), (128, 32, 128, 4, 8, 4, False, True),
        (64, 64, 128, 2, 4, 5, False, True),
    ],
    "down": [
        (64, 64, 128, 4, 4, 4, False, True), (64, 32, 128, 2, 4, 5, False, True), (64, 64, 128, 6, 4, 4, False, True),
        (64, 64, 128, 4, 4, 4, False, False), (64, 32, 256, 4, 4, 3, False, True), (128, 32, 128, 4, 8, 4, False, True),
        (64, 64, 128, 2, 4, 5, False, True),
    ],
    "head": [
        (128, 128, 64, 1, 8, 4, False, False), (128, 128, 64, 1, 8, 4, True, True), (128, 128, 64, 1, 8, 4, True, False),
    ],
}  # fmt: skip


def product_tiles(name: str, product: Product, rows: int) -> list[Recipe]:
    """What to time of the product `name` at `rows` rows."""
    found = [Recipe(tile) for tile in dict.fromkeys(_tiles(name, product, rows))]
    # A row has its own kernel, near the floor.
    return found[:4] if rows == 1 else found


def _tiles(name: str, product: Product, rows: int) -> Iterator[Tile]:
    if rows > 64:
        for bm, bn, bk, splits, warps, stages, swap, early in _MANY[name]:
            yield Tile(bm, bn, bk, splits, warps, stages, swap=swap, early=early)
        return
    small = product.norm is not None if name == "head" else product.weight.nbytes <= _SMALL_BYTES
    block_m = 16 if rows <= 16 else 32
    for bn, bk, splits, warps, stages, ahead, swap in (_SMALL if small else _LARGE)[name]:
        yield Tile(block_m, bn, bk, splits, warps, stages, prefetch=ahead, swap=swap, early=True)
