"""Recipes worth timing for a product: what the measurements so far have left in the race."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from runners.models.fused.fragment_gemm import FragmentTile, outputs_of, padded_rows
from runners.models.fused.recipe import Recipe
from runners.models.fused.skinny_gemm import Product, Tile

#: Weights below this leave less than a full wave of bandwidth-bound tiles: latency counts there.
_SMALL_BYTES = 20 << 20
#: Of a multiprocessor: registers, bytes of shared memory, and what the system keeps of those for each CTA.
_REGISTERS, _SHARED_BYTES, _SYSTEM_BYTES = 65536, 228 * 1024, 1024
#: Of the weight on its way to a CTA, at least.
_AHEAD_BYTES = 48 * 1024
#: Tiles of the fragment kernel among the candidates of a product, at most.
_FRAGMENTS = 4
#: Of an H100 or H200.
_MULTIPROCESSORS = 132
#: How much of a weight is brought to the L2 cache ahead: above half of its 50 MiB it drives itself out.
_PREFETCH_BYTES = 20 << 20


def candidates(product: Product, rows: int) -> list[Recipe]:
    """Tiles for `rows` rows of `product`, of any device; the vendor's GEMM is always one more."""
    n, k = product.num_outputs, int(product.weight.shape[1])
    small = product.weight.nbytes <= _SMALL_BYTES
    found: Iterator[Tile]
    if rows == 1:
        found = _one_row(product, n, k, small)
    elif small:
        found = _in_registers(product, rows, n, k)
    else:
        found = _streamed(product, rows, n, k)
    # Of the fragment kernel's those that came nearest to the best one within whole steps.
    fragments = sorted(
        fragment_tiles(product, rows), key=lambda tile: (tile.splits, abs(tile.warps - 8), -tile.tiles)
    )
    tiles: list[Tile | FragmentTile] = [*fragments[:_FRAGMENTS], *found]
    return [Recipe(tile) for tile in dict.fromkeys(tiles)]


def fragment_tiles(product: Product, rows: int) -> list[FragmentTile]:
    """Tiles of the fragment kernel for `rows` rows of `product` whose CTAs fill the device evenly."""
    k = int(product.weight.shape[1])
    found = []
    for warps, turns, splits in itertools.product((4, 8, 12, 16), range(1, 9), (1, 2, 3, 4, 8)):
        if warps * turns * splits * 64 != k:
            continue
        # Of a thread: x of its share, and the rest.
        registers = padded_rows(rows) * turns + 40
        if registers > min(255, _REGISTERS // (32 * warps)):
            continue
        min_ctas = min(4 if warps == 4 else 2, _REGISTERS // (32 * warps * registers))
        for tiles in (1, 2, 3, 4, 6, 8, 12, 16, 24):
            # Few sums of squares, but for a small product, whose CTAs add them up one tile each.
            part_tiles = next(n for n in (4, 3, 2, 1) if tiles % n == 0) if product.num_outputs > 2048 else 1
            tile = FragmentTile(turns, tiles, splits, warps, 1, part_tiles, min_ctas)
            room = _SHARED_BYTES // min_ctas - _SYSTEM_BYTES - tile.shared_bytes(rows)
            tile = replace(tile, stages=1 + min(room // tile.stage_bytes, turns * tiles - 1, 8))
            fits = tile.stages * tile.stage_bytes >= min(_AHEAD_BYTES, turns * tiles * tile.stage_bytes)
            if fits and tile.refusal(product, rows) is None and _fills(product, tile):
                found.append(tile)
    return found


def _fills(product: Product, tile: FragmentTile) -> bool:
    """Whether all CTAs are at work at once, or the last round leaves at most a sixth of the places idle."""
    ctas = product.num_outputs * tile.splits // (outputs_of(product) * tile.tiles)
    places = _MULTIPROCESSORS * tile.min_ctas
    rounds = -(-ctas // places)
    return (
        6 * ctas >= 5 * _MULTIPROCESSORS and rounds <= 4 and (rounds == 1 or 6 * ctas >= 5 * rounds * places)
    )


def _one_row(product: Product, n: int, k: int, small: bool) -> Iterator[Tile]:
    """Multiply-add tiles. The weight of a small product is all on its way before the wait."""
    if product.argmax:
        yield from (Tile(0, bn, bk) for bn, bk in ((16, 256), (8, 512), (8, 1024)))
        return
    weight_rows = int(product.weight.shape[0])
    shapes = ((2, 1024), (4, 1024), (8, 1024), (2, 2048), (4, 2048), (4, 512), (8, 512))
    for bn, bk in shapes if small else shapes[1:]:
        if bk > k:
            continue
        for splits in (1, 2, 3, 4) if small else (1, 2) if product.residual else (1,):
            per_split = -(-k // (splits * bk)) * bk
            programs = -(-n // bn) * splits
            if per_split * splits != k or not 250 <= programs <= 3100:
                continue
            if small and per_split > 2 * bk:
                continue
            yield Tile(0, bn, bk, splits)
            ahead = min(per_split - bk, _PREFETCH_BYTES // (2 * weight_rows)) // 512 * 512
            if ahead > 0 and not small and splits == 1:
                yield Tile(0, bn, bk, splits, prefetch=ahead)


def _in_registers(product: Product, rows: int, n: int, k: int) -> Iterator[Tile]:
    """Split so far that a program's share of the weight fits its registers ahead of the wait."""
    block_m = _block_m(rows)
    halves = 2 if product.silu else 1
    for bn in (16, 32, 64):
        for ahead in (256, 512, 1024) if rows <= 16 else (256, 512):
            splits, rest = divmod(k, ahead)
            programs = -(-n // bn) * splits
            # More warps than a tile has columns for only repeat each other's registers.
            warps = 8 if bn == 64 else 4
            if rest or not 90 <= programs <= 400 or splits > 12 or bn * ahead * halves > 8 * 1024 * warps:
                continue
            if rows <= 32:
                yield Tile(block_m, bn, ahead, splits, warps, 0, ahead)
    if rows <= 16:
        loops = [Tile(16, 32, 256, s, 4, 3, a) for s in (1, 2, 4) for a in (0, 256)]
    else:
        shapes = ((32, 128, 4), (64, 64, 5), (64, 128, 3))
        loops = [Tile(block_m, bn, bk, s, 4, x) for bn, bk, x in shapes for s in (1, 2, 4, 8)]
    for tile in loops:
        programs = -(-n // tile.block_n) * tile.splits
        if k % (tile.splits * tile.block_k) == 0 and 60 <= programs <= 400:
            yield tile


def _streamed(product: Product, rows: int, n: int, k: int) -> Iterator[Tile]:
    """Loops of several stages over a large weight."""
    block_m = _block_m(rows)
    shapes: tuple[tuple[int, int, int, bool], ...]
    if rows <= 16:
        shapes = ((32, 128, 4, False), (64, 128, 4, False), (64, 128, 3, True), (128, 64, 4, True),
                  (128, 128, 3, True))  # fmt: skip
    elif rows <= 32:
        shapes = ((32, 128, 4, False), (64, 64, 5, False), (64, 128, 3, True), (128, 64, 4, True))
    else:
        shapes = ((64, 64, 5, False), (64, 128, 3, False), (128, 64, 4, True))
    for bn, bk, stages, swap in shapes:
        if product.silu and bn > 64:
            continue
        for splits in (1, 2, 4) if product.residual else (1,):
            programs = -(-n // bn) * splits
            if programs > 300 and splits > 1:
                continue
            yield Tile(block_m, bn, bk, splits, 4, stages, swap=swap)
            if rows <= 32 and swap and not product.argmax:
                yield Tile(block_m, bn, bk, splits, 4, stages, ahead=bk, swap=swap)


def _block_m(rows: int) -> int:
    return 16 if rows <= 16 else min(1 << (rows - 1).bit_length(), 128)
