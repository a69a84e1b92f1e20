"""Products of up to 32 rows by warps that stream the weight as tensor-core fragments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from runners.models.fused.nvrtc import (
    ELEMENTS,
    MAX_WARPS,
    lacks_shared_memory,
    launch_cuda,
    unusable_reason,
)
from runners.models.fused.skinny_gemm import OWN_TENSORS, Product, ProductOutput, Rows, Targets

_SOURCE = Path(__file__).parent / "kernels" / "fragment_gemm.cu"
#: Inputs of one turn of a warp, rows of the weight of a tile, floats between two rows of partial sums.
_TURN, _TILE_ROWS, _STRIDE = 64, 16, 20
MAX_ROWS = 32
#: CTAs of a cluster that every device with clusters takes.
_MAX_CLUSTER = 8
#: Devices from here on have clusters; those from `_FIRST` on asynchronous copies and these tensor cores.
_CLUSTERS, _FIRST = (9, 0), (8, 0)


@dataclass(frozen=True)
class FragmentTile:
    """How the kernel cuts a product up. The inner dimension is `splits * warps * turns * 64`."""

    #: Turns of 64 inputs that make up a warp's share of the inner dimension: x of that share is in registers.
    turns: int
    #: Tiles of 16 rows of the weight that a CTA computes.
    tiles: int
    #: CTAs of a cluster that split the inner dimension.
    splits: int = 1
    warps: int = 8
    #: Turns whose weight is on its way.
    stages: int = 4
    #: Tiles behind one sum of squares.
    part_tiles: int = 1
    #: CTAs for which the registers of a multiprocessor must suffice.
    min_ctas: int = 2

    def __str__(self) -> str:
        name = f"frag{self.turns}t{self.tiles}s{self.splits}w{self.warps}"
        return f"{name}x{self.stages}p{self.part_tiles}o{self.min_ctas}"

    @property
    def cta_inputs(self) -> int:
        """Inputs that a CTA multiplies."""
        return self.warps * self.turns * _TURN

    @property
    def stage_bytes(self) -> int:
        """Bytes of the weight that the warps of a CTA copy in a turn."""
        return 2 * _TURN * _TILE_ROWS * self.warps

    def refusal(self, product: Product, num_rows: int) -> str | None:
        """Why this tile cannot compute `product` of `num_rows` rows; None if it can."""
        k, outputs = int(product.weight.shape[1]), outputs_of(product) * self.tiles
        # Without a stage there is no slot to copy to: the kernel would compute garbage.
        sizes = (self.turns, self.tiles, self.splits, self.warps, self.stages, self.part_tiles, self.min_ctas)
        if min(sizes) < 1 or self.splits > _MAX_CLUSTER or self.warps > MAX_WARPS:
            return f"its numbers are at least 1, its splits at most {_MAX_CLUSTER}, its warps {MAX_WARPS}"
        if num_rows > MAX_ROWS:
            return f"{num_rows} rows are more than {MAX_ROWS}"
        if product.weight.dtype not in ELEMENTS or product.argmax or product.norm is not None:
            return "it takes bfloat16 and float16, no arg max and no norm that is not folded"
        if product.silu and product.bias is not None:
            return "it adds no bias ahead of SiLU"
        if k != self.splits * self.cta_inputs:
            return f"its clusters have {self.splits * self.cta_inputs} inputs and the weight {k}"
        if product.num_outputs % outputs or self.tiles % self.part_tiles:
            return f"its CTAs have {outputs} outputs in parts of {self.part_tiles} tiles, of {product.num_outputs}"
        return None

    def shared_bytes(self, num_rows: int) -> int:
        """Shared memory of a CTA for `num_rows` rows."""
        rows = padded_rows(num_rows)
        finished = -(-rows // self.splits) * self.splits
        sums = 2 * self.warps * rows * _STRIDE + self.tiles * finished * _TILE_ROWS + rows
        return self.stages * self.stage_bytes + 4 * sums


def outputs_of(product: Product) -> int:
    """Outputs of a tile: with SiLU its 16 rows are 8 of the gate and 8 of up."""
    return _TILE_ROWS // 2 if product.silu else _TILE_ROWS


def padded_rows(num_rows: int) -> int:
    """The rows that a kernel for `num_rows` computes: the tensor core takes eight at a time."""
    return -(-num_rows // 8) * 8


def unsupported(device: torch.device, tile: FragmentTile, num_rows: int) -> str | None:
    """Why the kernel does not run on `device` by `tile`, for `num_rows` rows; None if it does."""
    reason = unusable_reason(device, _CLUSTERS if tile.splits > 1 else _FIRST)
    return reason or lacks_shared_memory(device, tile.shared_bytes(num_rows))


def product_fragment(
    rows: Rows,
    product: Product,
    residual: torch.Tensor | None,
    tile: FragmentTile,
    *,
    targets: Targets = OWN_TENSORS,
    pdl: bool = False,
) -> ProductOutput:
    """One kernel. A `scaled` product reads `rows.squares`. ValueError for a product that `tile` does not fit."""
    x = rows.x
    num_rows, n = x.shape[0], product.num_outputs
    reason = tile.refusal(product, num_rows)
    if reason is not None:
        raise ValueError(f"tile {tile} does not compute this product: {reason}")
    out = x.new_empty(num_rows, n) if targets.rows is None else targets.rows
    num_parts = product.weight.shape[0] // (_TILE_ROWS * tile.part_tiles)
    squares_out = x.new_empty(num_rows, num_parts, dtype=torch.float32) if residual is not None else x
    squares = x
    if product.scaled:
        assert rows.squares is not None
        squares = rows.squares
    defines = {
        "ELEMENT": ELEMENTS[x.dtype], "ROWS": padded_rows(num_rows), "WARPS": tile.warps, "TURNS": tile.turns,
        "TILES": tile.tiles, "SPLITS": tile.splits, "STAGES": tile.stages, "PART_TILES": tile.part_tiles,
        "MIN_CTAS": tile.min_ctas, "SCALED": int(product.scaled), "RESIDUAL": int(residual is not None),
        "SILU": int(product.silu), "BIAS": int(product.bias is not None), "PDL": int(pdl),
    }  # fmt: skip
    launch_cuda(
        _SOURCE, "fragment_gemm", defines,
        (x, squares, product.weight, x if product.bias is None else product.bias,
         x if residual is None else residual, out, squares_out, num_rows,
         squares.shape[1] if product.scaled else 0, n, product.eps),
        grid=n // (outputs_of(product) * tile.tiles) * tile.splits, threads=32 * tile.warps,
        shared_bytes=tile.shared_bytes(num_rows), cluster=tile.splits, pdl=pdl, device=x.device,
    )  # fmt: skip
    return ProductOutput(Rows(out, None if residual is None else squares_out))
