"""Product tiles worth timing beside those of the shipped table."""

from __future__ import annotations

from runners.models.fused.candidates import fragment_tiles
from runners.models.fused.fragment_gemm import MAX_ROWS, FragmentTile
from runners.models.fused.recipe import Recipe
from runners.models.fused.skinny_gemm import Product, Tile

#: Weights below this have no tall tiles.
_SMALL_BYTES = 20 << 20
#: At up to 32 rows, the weight as the tall side: block of outputs, of the inner dimension, splits, warps, stages.
_TALL: dict[str, list[tuple[int, int, int, int, int]]] = {
    name: [
        (64, 128, 4, 4, 4), (64, 128, 4, 4, 5), (64, 128, 2, 4, 6), (64, 128, 3, 4, 6), (128, 128, 4, 8, 3),
        (128, 128, 4, 8, 4), (128, 64, 4, 4, 6), (64, 256, 4, 4, 3), (64, 256, 2, 4, 4), (64, 64, 4, 4, 6),
    ]
    for name in ("output", "down")
}  # fmt: skip
#: At many rows: block of rows, of outputs, of the inner dimension, splits, warps, stages, swapped, by the streamed kernel.
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
    if rows <= MAX_ROWS:
        tiles: list[Tile | FragmentTile] = [*fragment_tiles(product, rows)]
        if rows > 16 and product.weight.nbytes > _SMALL_BYTES:
            tiles += [Tile(32, *shape, swap=True) for shape in _TALL.get(name, ())]
        return [Recipe(tile) for tile in tiles]
    return [
        Recipe(Tile(bm, bn, bk, splits, warps, stages, swap=swap, early=early))
        for bm, bn, bk, splits, warps, stages, swap, early in _MANY[name]
    ]
