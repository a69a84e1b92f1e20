"""Products of few rows with a weight, fused with what stands before and after them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from runners.models.fused.activation import squares_block
from runners.models.fused.argmax import greedy_from_tiles, greedy_torch
from runners.models.fused.rms_norm import rms_norm_torch


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts a product up. `block_m` 0 is the multiply-add kernel, for one row only."""

    block_m: int
    block_n: int
    block_k: int
    splits: int = 1
    num_warps: int = 4
    #: Software pipelining of the loop; 0 leaves the loop out: what is loaded ahead is all there is.
    stages: int = 4
    #: Elements of each weight row loaded before the kernel before has ended: a power of two, or 0.
    ahead: int = 0
    #: Elements of each weight row behind those, brought to the L2 cache by then.
    prefetch: int = 0
    #: The weight's rows are the tall side of the tensor core's tile.
    swap: bool = False
    #: The loop's first turns of the weight are in flight before the kernel before has ended.
    early: bool = False

    def inputs_per_split(self, k: int) -> int:
        """Inputs of each split of a product of `k`: whole blocks. ValueError for more than a tile without a loop loads."""
        inputs = -(-k // (self.splits * self.block_k)) * self.block_k
        if self.block_m and not self.stages and inputs > self.ahead:
            raise ValueError(
                f"tile {self} has no loop and loads {self.ahead} elements of each weight row, but a split of {k} "
                f"inputs has {inputs}: give it more splits, or stages"
            )
        return inputs

    def __str__(self) -> str:
        kind = "gemv" if self.block_m == 0 else f"m{self.block_m}"
        name = f"{kind}n{self.block_n}k{self.block_k}s{self.splits}w{self.num_warps}"
        name += f"x{self.stages}a{self.ahead}" if self.block_m else ""
        return name + (f"p{self.prefetch}" if self.prefetch else "") + "t" * self.swap + "e" * self.early


@dataclass(frozen=True)
class Product:
    """One product of a layer: `f(scale * (x @ weight.T) + bias)`."""

    #: `[n, k]`; with `silu` `[2 * n, k]`, gate rows and then up rows.
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    #: The input is RMS-normed first; the norm's weight is folded into `weight`, or is `norm`.
    scaled: bool = False
    #: `[k]` weight of the norm where it cannot be folded: the weight is another module's too.
    norm: torch.Tensor | None = None
    eps: float = 0.0
    silu: bool = False
    #: The output is added to the residual stream.
    residual: bool = False
    #: Also find the largest output of each row (greedy sampling).
    argmax: bool = False

    @property
    def num_outputs(self) -> int:
        return int(self.weight.shape[0]) // (2 if self.silu else 1)


@dataclass
class Rows:
    """Rows of the residual stream, and what is known of their norm."""

    #: `[num_rows, size]`.
    x: torch.Tensor
    #: `[num_rows, parts]` float32: sums of squares of parts of each row; None where nobody computed them.
    squares: torch.Tensor | None = None


@dataclass
class ProductOutput:
    """What a product leaves."""

    #: `[num_rows, n]`, with sums of squares if the product adds to the residual stream.
    rows: Rows
    #: `[num_rows]` int64 with `argmax`, else None.
    token_ids: torch.Tensor | None = None


@dataclass(frozen=True)
class Targets:
    """Where a product writes, if not to tensors of its own. Only for one that adds to nothing."""

    #: `[num_rows, n]`.
    rows: torch.Tensor | None = None
    #: `[num_rows]` int64, for the arg max.
    token_ids: torch.Tensor | None = None


#: No targets.
OWN_TENSORS = Targets()


def linear(x: torch.Tensor, product: Product, targets: Targets) -> torch.Tensor:
    """The vendor's GEMM."""
    if targets.rows is None:
        return F.linear(x, product.weight, product.bias)
    if product.bias is None:
        return torch.mm(x, product.weight.t(), out=targets.rows)
    return torch.addmm(product.bias, x, product.weight.t(), out=targets.rows)


def product_torch(
    x: torch.Tensor, product: Product, residual: torch.Tensor | None, targets: Targets = OWN_TENSORS
) -> ProductOutput:
    """The plain twin of both kernels."""
    if product.scaled:
        x = rms_norm_torch(x, product.norm, product.eps)
    out = linear(x, product, targets)
    if product.silu:
        gate, up = out.float().chunk(2, dim=-1)
        out = (F.silu(gate) * up).to(x.dtype)
    if residual is not None:
        out = residual + out
    return ProductOutput(Rows(out), greedy_torch(out, targets.token_ids) if product.argmax else None)


_counters: dict[torch.device, torch.Tensor] = {}
#: Tiles that one product may have.
_MAX_TILES = 1 << 16


def _counter(device: torch.device) -> torch.Tensor:
    """Zero between kernels, which run one after another: one array serves them all."""
    if device not in _counters:
        _counters[device] = torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)
    return _counters[device]


def product_triton(
    rows: Rows,
    product: Product,
    residual: torch.Tensor | None,
    tile: Tile,
    *,
    targets: Targets = OWN_TENSORS,
    pdl: bool = False,
) -> ProductOutput:
    """One kernel, and one more for the arg max. A `scaled` product reads `rows.squares`."""
    x = rows.x
    num_rows, n = x.shape[0], product.num_outputs
    tiles = -(-n // tile.block_n)
    out = x.new_empty(num_rows, n) if targets.rows is None else targets.rows
    none = x
    squares = x.new_empty(num_rows, tiles, dtype=torch.float32) if residual is not None else none
    best = x.new_empty(num_rows, tiles, dtype=torch.float32) if product.argmax else none
    arg = x.new_empty(num_rows, tiles, dtype=torch.int32) if product.argmax else none
    parts = none
    if tile.splits > 1:
        parts = x.new_empty(tile.splits * (2 if product.silu else 1) * num_rows * n, dtype=torch.float32)
    tensors = (
        x, none if rows.squares is None or not product.scaled else rows.squares, product.weight,
        none if product.bias is None else product.bias, none if residual is None else residual, out, squares,
        best, arg, parts, _counter(x.device),
    )  # fmt: skip
    _launch(tensors, product, tile, residual is not None, pdl)
    tokens = greedy_from_tiles(best, arg, n, out=targets.token_ids, pdl=pdl) if product.argmax else None
    return ProductOutput(Rows(out, None if residual is None else squares), tokens)


def _launch(
    tensors: tuple[torch.Tensor, ...], product: Product, tile: Tile, has_residual: bool, pdl: bool
) -> None:
    from runners.models.fused.kernels.gemv import gemv_kernel
    from runners.models.fused.kernels.skinny_gemm import skinny_gemm_kernel
    from runners.models.fused.kernels.streamed_gemm import streamed_gemm_kernel
    from runners.models.fused.launch import launch, launch_options

    x, squares = tensors[:2]
    (num_rows, k), n = x.shape, product.num_outputs
    tiles = -(-n // tile.block_n)
    num_squares = squares.shape[1] if product.scaled else 1
    k_per_split = tile.inputs_per_split(k)
    # The bulk prefetch counts in 16 bytes and takes 16-bit weights.
    can_prefetch = k % 8 == 0 and product.weight.element_size() == 2
    common = {
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "SPLITS": tile.splits,
        "PREFETCH": tile.prefetch if can_prefetch else 0,
        "PARTS": max(1, 32 * tile.num_warps // tile.block_n),
        "SQUARES_BLOCK": squares_block(num_squares),
        "SCALED": product.scaled,
        "HAS_BIAS": product.bias is not None,
        "HAS_RESIDUAL": has_residual,
        "SILU": product.silu,
        "ARGMAX": product.argmax,
        "PDL": pdl,
        **launch_options(pdl, num_warps=tile.num_warps),
    }
    if tile.block_m == 0:
        assert num_rows == 1, "the multiply-add kernel takes one row"
        launch(
            gemv_kernel, (tiles, tile.splits), *tensors, num_squares, n, k, k_per_split, product.eps, **common
        )
        return
    # Whole tiles everywhere: then no load of the weight is masked.
    even = k == k_per_split * tile.splits and n % tile.block_n == 0
    kernel = streamed_gemm_kernel if tile.early else skinny_gemm_kernel
    own = {} if tile.early else {"BLOCK_AHEAD": tile.ahead}
    launch(kernel, (tiles, tile.splits, -(-num_rows // tile.block_m)),
        *tensors, num_rows, num_squares, n, k, k_per_split, product.eps, BLOCK_M=tile.block_m, EVEN=even,
        SWAP=tile.swap, STAGES=tile.stages, **own, **common,
    )  # fmt: skip
