"""Kernels against float32 references, and with against without dependent launch, bit by bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from fused_bench.compile_ahead import shape_product
from fused_bench.rig import (
    ALL_DIMS,
    BATCHES,
    CONTEXT,
    DEVICE,
    RESULTS,
    Dims,
    decode_batch,
    make_kv,
    random_decoder,
    run_step,
    triton_backend,
)
from fused_bench.tiles import attention_tiles
from runners.attention.torch_backend import TorchAttentionBackend
from runners.models.fused.candidates import candidates
from runners.models.fused.layers import FusedDecoder
from runners.models.fused.recipe import VENDORS, run_product
from runners.models.fused.skinny_gemm import Product, Rows
from runners.paged_kv import PagedKV


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is wanted."""
    got, want = got.double().cpu(), want.double().cpu()
    return float((got - want).norm() / want.norm())


def check_products(dims: Dims) -> None:
    """Every candidate of every product, against float32 on the GPU; with PDL the same bits."""
    bad, count, worst = [], 0, 0.0
    for name, (n, k) in dims.shapes().items():
        if name == "head":
            n = 8192
        weight = torch.randn((2 if name == "gate_up" else 1) * n, k, device=DEVICE) * k**-0.5
        product = shape_product(name, n, k, dims.tied, weight.bfloat16())
        if product.norm is not None:
            product = replace(product, norm=torch.rand_like(product.norm) + 0.5)
        for rows in (*BATCHES, 5):
            x = torch.randn(rows, k, dtype=torch.bfloat16, device=DEVICE) * 3
            residual = torch.randn(rows, n, device=DEVICE).bfloat16() if product.residual else None
            want = reference(x, product, residual)
            for index, recipe in enumerate((*VENDORS, *candidates(product, rows))):
                try:
                    outs = [
                        run_product(Rows(x), product, recipe, residual=residual, pdl=pdl)
                        for pdl in (index % 4 != 1, True, True)
                    ]
                except Exception as error:
                    bad.append(f"{name} m={rows} {recipe}: {type(error).__name__} {str(error)[:80]}")
                    continue
                count += 1
                error = relative(outs[0].rows.x, want)
                same = all(torch.equal(outs[0].rows.x, o.rows.x) for o in outs[1:])
                squares = outs[1].rows.squares
                if squares is not None:
                    same &= relative(squares.sum(1), outs[1].rows.x.float().square().sum(1)) < 1e-4
                tokens = outs[1].token_ids
                if tokens is not None:
                    same &= bool((outs[1].rows.x.float().argmax(-1) == tokens).all())
                worst = max(worst, error if error == error else 9.0)
                if not error < 6e-3 or not same:
                    bad.append(f"{name} m={rows} {recipe}: error {error:.4f} same {same}")
    print(f"   {dims.name}: {count} products, worst error {worst:.5f}, {len(bad)} bad", flush=True)
    for line in bad[:6]:
        print(f"   !! {line}", flush=True)
    RESULTS.setdefault("check_products", {})[dims.name] = {"count": count, "worst": worst, "bad": bad}


def reference(x: torch.Tensor, product: Product, residual: torch.Tensor | None) -> torch.Tensor:
    """The product in float32."""
    wide = x.float()
    if product.scaled:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + product.eps)
        if product.norm is not None:
            wide = wide * product.norm.float()
    out = F.linear(wide, product.weight.float())
    if product.silu:
        gate, up = out.chunk(2, dim=-1)
        out = F.silu(gate) * up
    return out if residual is None else out + residual.float()


def check_model() -> None:
    """Two layers in bfloat16 by the kernels against the plain twins in float32 on the CPU."""
    dims = replace(ALL_DIMS["0.6b"], layers=2, vocab=4096)
    decoder = random_decoder(dims)
    wide = copy_to_cpu(decoder, dims)
    for bs in (1, 5, 32, 128):
        lens = [1 + (37 * i) % CONTEXT for i in range(bs)]
        kv = make_kv(dims, bs, CONTEXT, dims.layers)
        batch = decode_batch(kv, list(range(1, bs + 1)), lens, dims.vocab)
        want = run_reference(wide, dims, kv, batch)
        bucket = next(b for b in BATCHES if b >= bs)
        backend, errors, same = triton_backend(dims, kv, bs), {}, True
        decoder.choice.recipes.clear()
        for turn in range(4):
            if turn:
                for name, products in decoder.products().items():
                    found = candidates(products[0], bucket)
                    decoder.choice.recipes[name, bucket] = found[turn * len(found) // 4]
            tiles = attention_tiles(bucket)
            backend.tiles[bs] = tiles[turn * len(tiles) // 4]
            try:
                outs = []
                for pdl in (False, True, True):
                    decoder.pdl = backend.pdl = pdl
                    outs.append(run_step(decoder, backend, kv, batch))
            except Exception as error:
                print(f"   !! bs {bs} turn {turn}: {type(error).__name__} {str(error)[:120]}", flush=True)
                RESULTS["errors"][f"check model {bs} {turn}"] = str(error)[:300]
                continue
            errors[turn] = relative(outs[1].logits, want)
            same &= all(torch.equal(outs[0].logits, o.logits) for o in outs[1:])
            for out in outs:
                same &= bool((out.logits[0].float().argmax(-1) == out.next_token_ids).all())
        RESULTS.setdefault("model_check", {})[bs] = {"errors": errors, "same_bits": same}
        print(
            f"   bs {bs}: errors " + " ".join(f"{e:.4f}" for e in errors.values()) + f" same bits {same}",
            flush=True,
        )
        assert errors and max(errors.values()) < 0.03 and same


def run_reference(wide: FusedDecoder, dims: Dims, kv: PagedKV, batch: Any) -> torch.Tensor:
    """Logits of the plain twins in float32, over a copy of the cache."""
    kv_cpu = PagedKV([dims.group] * dims.layers, num_pages=kv.num_pages, page_size=16, max_requests=batch.batch_size,
                     max_seq_len=CONTEXT, dtype=torch.float32, device="cpu")  # fmt: skip
    kv_cpu.page_table.copy_(kv.page_table.cpu())
    for ours, theirs in zip((*kv_cpu.k_cache, *kv_cpu.v_cache), (*kv.k_cache, *kv.v_cache), strict=True):
        ours.copy_(theirs.float().cpu())
    reference = TorchAttentionBackend(
        [dims.group], kv_cpu, max_batch_size=batch.batch_size, max_seq_len=CONTEXT, device=kv_cpu.device
    )
    cpu_batch = batch.to(torch.device("cpu"))
    reference.init_forward_metadata(cpu_batch)
    logits: torch.Tensor = run_step(wide, reference, kv_cpu, cpu_batch).logits
    return logits


def copy_to_cpu(decoder: FusedDecoder, dims: Dims) -> FusedDecoder:
    """The same weights in float32 on the CPU."""
    twin = random_decoder(dims, torch.float32, torch.device("cpu"))
    values = dict(decoder.named_parameters())
    for name, parameter in twin.named_parameters():
        parameter.data.copy_(values[name].float().cpu())
    twin.cos_sin.copy_(decoder.cos_sin.cpu())
    return twin
