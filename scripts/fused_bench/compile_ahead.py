"""Fills Triton's cache from several processes: one process compiles one kernel at a time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence

import torch

from fused_bench.rig import BATCHES, CONTEXT, DEVICE, Dims, decode_batch, make_kv, triton_backend
from fused_bench.tiles import attention_tiles
from runners.attention.base import AttentionLayer
from runners.attention.triton_backend import AttentionTile
from runners.models.fused.candidates import candidates
from runners.models.fused.qk_rope_cache import HeadInputs
from runners.models.fused.recipe import Recipe, run_product
from runners.models.fused.skinny_gemm import Product, Rows

#: Product, its sizes, rows, recipe, width of the sums of squares that it reads, dependent launch.
Job = tuple[str, int, int, bool, int, Recipe, int, bool]


def shape_product(name: str, n: int, k: int, tied: bool, weight: torch.Tensor | None = None) -> Product:
    """A product of a model's sizes, on `weight` or on one without storage."""
    if weight is None:
        weight = torch.empty((2 if name == "gate_up" else 1) * n, k, dtype=torch.bfloat16, device="meta")
    norm = torch.ones(k, dtype=weight.dtype, device=weight.device) if name == "head" and tied else None
    return Product(
        weight, scaled=name in ("qkv", "gate_up", "head"), norm=norm, eps=1e-6, silu=name == "gate_up",
        residual=name in ("output", "down"), argmax=name == "head",
    )  # fmt: skip


def compile_ahead(all_dims: list[Dims], all_rows: Sequence[int] = BATCHES, for_checks: bool = True) -> str:
    """Compile every candidate; return how many there were. The checks need attention and more variants."""
    jobs: dict[tuple[object, ...], Job] = {}
    for dims in all_dims:
        for name, (n, k) in dims.shapes().items():
            for rows in all_rows:
                for index, recipe in enumerate(candidates(shape_product(name, n, k, dims.tied), rows)):
                    wanted = [(width, True) for width in _widths(name, rows, dims)]
                    wanted += [(64, False)] if for_checks and index % 4 == 0 else []  # what the checks need
                    for width, pdl in wanted:
                        kind = name if name not in ("output", "down") else "residual"
                        key = (kind, dims.tied and name == "head", recipe, width, pdl)
                        jobs.setdefault(key, (name, n, k, dims.tied, rows, recipe, width, pdl))
    work = list(jobs.values())
    batches = BATCHES if for_checks else ()
    tiles = list({(dims, tile): None for dims in all_dims for bs in batches for tile in attention_tiles(bs)})
    count = min(15, multiprocessing.cpu_count())
    context = multiprocessing.get_context("spawn")
    children = [
        context.Process(target=_compile_some, args=(work[i::count], tiles[i::count])) for i in range(count)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    return f"{len(work)} products and {len(tiles)} attentions"


def _widths(name: str, rows: int, dims: Dims) -> tuple[int, ...]:
    """Widths of sums of squares: of the benchmark's random input, and of what the product before leaves."""
    if name not in ("qkv", "gate_up") or rows > 32:
        return (64,)
    if rows == 1:
        return (64, 256, 1024) if dims.hidden == 1024 else (64, 1024)
    return (64,) if dims.hidden == 1024 else (64, 256)


def _compile_some(jobs: list[Job], tiles: list[tuple[Dims, AttentionTile]]) -> None:
    for dims, tile in tiles:
        try:
            _compile_attention(dims, tile)
        except Exception as error:
            print(f"   compile {tile}: {type(error).__name__}: {str(error)[:120]}", flush=True)
    for job in jobs:
        try:
            compile_product(job)
        except Exception as error:
            print(f"   compile {job[0]} m={job[4]} {job[5]}: {str(error)[:120]}", flush=True)
    torch.cuda.synchronize()


def _compile_attention(dims: Dims, tile: AttentionTile) -> None:
    kv = make_kv(dims, 1, CONTEXT, 1)
    backend, batch = triton_backend(dims, kv, 1), decode_batch(kv, [1], [CONTEXT], 100)
    backend.tiles[1] = tile
    norm = torch.ones(dims.head_dim, dtype=torch.bfloat16, device=DEVICE)
    qkv = torch.zeros(1, dims.layout.num_heads * dims.head_dim, dtype=torch.bfloat16, device=DEVICE)
    cos_sin = torch.ones(CONTEXT, dims.head_dim, device=DEVICE)
    inputs = HeadInputs(dims.layout, norm, norm, cos_sin, batch.positions)
    for pdl in (True, False):
        backend.pdl = pdl
        backend.attend_fused(qkv, inputs, AttentionLayer(0, kv.k_cache[0], kv.v_cache[0]), batch)


def compile_product(job: Job) -> None:
    """Run one product once."""
    name, n, k, tied, rows, recipe, width, pdl = job
    weight = torch.empty((2 if name == "gate_up" else 1) * n, k, dtype=torch.bfloat16, device=DEVICE)
    product = shape_product(name, n, k, tied, weight)
    x = torch.zeros(rows, k, dtype=torch.bfloat16, device=DEVICE)
    residual = torch.zeros(rows, n, dtype=torch.bfloat16, device=DEVICE) if product.residual else None
    run_product(Rows(x, torch.ones(rows, width, device=DEVICE)), product, recipe, residual=residual, pdl=pdl)
