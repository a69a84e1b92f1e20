"""One product by one tile of our kernels, or by the vendor's GEMM, against its plain twin in float32."""

from __future__ import annotations

from dataclasses import replace

import torch

from runners.models.fused.fragment_gemm import FragmentTile
from runners.models.fused.recipe import Library, Recipe, run_product, run_tile
from runners.models.fused.skinny_gemm import Product, ProductOutput, Rows, Tile, product_torch

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
#: Triton's interpreter multiplies no bfloat16.
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
#: Relative error of the output: bfloat16 rounds it, and the float32 of the tensor cores is exact enough.
_MAX_ERROR = 6e-3

#: None is the vendor's GEMM by torch's first choice.
AnyTile = Tile | FragmentTile | Library | None


def random_product(n: int, k: int, kind: str, dtype: torch.dtype = DTYPE, bias: bool = False) -> Product:
    """`kind` is `scaled`, `silu` (scaled, `2 * n` rows), `residual` or `argmax` (scaled)."""
    weight = torch.randn(2 * n if kind == "silu" else n, k, device=DEVICE) * k**-0.5
    return Product(
        weight.to(dtype), torch.randn(len(weight), device=DEVICE).to(dtype) if bias else None,
        scaled=kind != "residual", eps=1e-6, silu=kind == "silu", residual=kind == "residual",
        argmax=kind == "argmax",
    )  # fmt: skip


def check_product(product: Product, tile: AnyTile, rows: int, width: int = 64, pdl: bool = False) -> str:
    """What is wrong at `rows` rows, against float32 and against itself again; empty if nothing.

    `width` is that of the sums of squares, `tile` None the vendor's GEMM.
    """
    n, k, dtype = product.num_outputs, int(product.weight.shape[1]), product.weight.dtype
    x = torch.randn(rows, k, device=DEVICE).to(dtype) * 3
    residual = torch.randn(rows, n, device=DEVICE).to(dtype) if product.residual else None
    squares = torch.zeros(rows, width, device=DEVICE)
    squares.index_add_(1, torch.arange(k, device=DEVICE) % width, x.float().square())
    bias = None if product.bias is None else product.bias.float()
    wide = replace(product, weight=product.weight.float(), bias=bias)
    want = product_torch(x.float(), wide, None if residual is None else residual.float()).rows.x
    outs = [_run(Rows(x, squares), product, residual, tile, pdl) for _ in range(3)]
    got, wrong = outs[1].rows.x, []
    if not _relative(got, want) < _MAX_ERROR:
        wrong.append(f"error {_relative(got, want):.4f}")
    if not all(torch.equal(got, out.rows.x) for out in outs):
        wrong.append("bits differ")
    left, ids = outs[1].rows.squares, outs[1].token_ids
    if left is not None and not _relative(left.sum(1), got.float().square().sum(1)) < 1e-4:
        wrong.append("sums of squares")
    if ids is not None and not torch.equal(got.float().argmax(-1), ids):
        wrong.append("arg max")
    return ", ".join(wrong)


def _run(
    rows: Rows, product: Product, residual: torch.Tensor | None, tile: AnyTile, pdl: bool
) -> ProductOutput:
    if tile is None or isinstance(tile, Library):
        return run_product(rows, product, Recipe(tile), residual=residual, pdl=pdl)
    return run_tile(rows, product, residual, tile, pdl=pdl)


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())
