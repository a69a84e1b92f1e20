"""How one product of a layer is computed, norm and epilogue included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from runners.models.fused.activation import RowScale, silu_and_mul
from runners.models.fused.argmax import greedy
from runners.models.fused.fragment_gemm import FragmentTile, product_fragment, unsupported
from runners.models.fused.rms_norm import rms_norm, row_squares
from runners.models.fused.skinny_gemm import (
    OWN_TENSORS,
    Product,
    ProductOutput,
    Rows,
    Targets,
    Tile,
    linear,
    product_torch,
    product_triton,
)


@dataclass(frozen=True)
class Library:
    """The vendor's GEMM, by a library that is not torch's first choice; that one is no tile at all."""

    #: `cublaslt`: the first of its heuristics.
    library: str = "cublaslt"

    def __post_init__(self) -> None:
        if self.library != "cublaslt":
            raise ValueError(f"the library {self.library!r} is none: only cublaslt is")

    def __str__(self) -> str:
        return self.library


@dataclass(frozen=True)
class Recipe:
    """`tile` None is the vendor's GEMM."""

    tile: Tile | FragmentTile | Library | None = None

    def __str__(self) -> str:
        return "cublas" if self.tile is None else str(self.tile)


def refusal(recipe: Recipe, product: Product, num_rows: int) -> str | None:
    """Why `recipe` cannot compute `product` of up to `num_rows` rows where its weight lies; None if it can."""
    tile = recipe.tile
    if not isinstance(tile, FragmentTile):
        return None
    return tile.refusal(product, num_rows) or unsupported(product.weight.device, tile, num_rows)


#: The vendor's GEMM between our norm and epilogue kernels: right for every shape, and for prefill.
VENDOR = Recipe()
#: The same by cuBLASLt.
VENDOR_LT = Recipe(Library())
#: What every product is timed by beside its candidates.
VENDORS = (VENDOR, VENDOR_LT)


def run_product(
    rows: Rows,
    product: Product,
    recipe: Recipe,
    *,
    residual: torch.Tensor | None = None,
    targets: Targets = OWN_TENSORS,
    pdl: bool = False,
) -> ProductOutput:
    """Compute `product` of `rows`, added to `residual` `[num_rows, n]` if given, by `recipe`.

    On a CPU the plain twin computes it, whatever the recipe.
    """
    if not rows.x.is_cuda:
        return product_torch(rows.x, product, residual, targets)
    if recipe.tile is None:
        return _vendor(rows, product, residual, targets, pdl)
    if isinstance(recipe.tile, Library):
        with _preferred(recipe.tile.library):
            return _vendor(rows, product, residual, targets, pdl)
    if product.norm is not None:
        rows = Rows(rms_norm(rows.x, product.norm, product.eps, pdl=pdl))
        product = replace(product, norm=None, scaled=False)
    elif product.scaled and rows.squares is None:
        rows = Rows(rows.x, row_squares(rows.x, pdl=pdl))
    return run_tile(rows, product, residual, recipe.tile, targets=targets, pdl=pdl)


@contextmanager
def _preferred(library: str) -> Iterator[None]:
    """Within the block torch asks `library` for its GEMMs; RuntimeError where torch was built without it."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def run_tile(
    rows: Rows,
    product: Product,
    residual: torch.Tensor | None,
    tile: Tile | FragmentTile,
    *,
    targets: Targets = OWN_TENSORS,
    pdl: bool = False,
) -> ProductOutput:
    """Compute `product` by the kernel that `tile` is of. A `scaled` product reads `rows.squares`."""
    if isinstance(tile, FragmentTile):
        return product_fragment(rows, product, residual, tile, targets=targets, pdl=pdl)
    return product_triton(rows, product, residual, tile, targets=targets, pdl=pdl)


def _vendor(
    rows: Rows, product: Product, residual: torch.Tensor | None, targets: Targets, pdl: bool
) -> ProductOutput:
    x, scale = rows.x, None
    if product.scaled:
        scale = _late_scale(rows, product)
        if scale is None:
            x = rms_norm(x, product.norm, product.eps, pdl=pdl)
    if residual is not None:
        out = torch.addmm(residual, x, product.weight.t())
        return ProductOutput(Rows(out if product.bias is None else out + product.bias))
    out = linear(x, product, targets)
    if product.silu:
        out = silu_and_mul(out, scale, pdl=pdl)
    return ProductOutput(Rows(out), greedy(out, out=targets.token_ids, pdl=pdl) if product.argmax else None)


def _late_scale(rows: Rows, product: Product) -> RowScale | None:
    """The scale of the input's norm, if the kernel behind the product can apply it: a kernel less.

    Not in float16: what was not normed may be beyond its range.
    """
    can_wait = product.silu and product.norm is None and product.bias is None
    if rows.squares is None or not can_wait or rows.x.dtype != torch.bfloat16:
        return None
    return RowScale(rows.squares, int(product.weight.shape[1]), product.eps)
