"""Products, attention and whole steps, timed in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import torch

from fused_bench.flashinfer_times import time_flashinfer
from fused_bench.rig import (
    BATCHES,
    CONTEXT,
    DEVICE,
    RESULTS,
    Dims,
    decode_batch,
    make_kv,
    part,
    run_step,
    triton_backend,
)
from fused_bench.tiles import attention_tiles
from runners.attention.base import AttentionLayer
from runners.attention.triton_backend import AttentionTile, TritonAttentionBackend
from runners.forward_batch import ForwardBatch
from runners.models.fused.candidates import candidates
from runners.models.fused.gemm_choice import time_in_graph
from runners.models.fused.layers import FusedDecoder
from runners.models.fused.qk_rope_cache import HeadInputs
from runners.models.fused.recipe import VENDOR, VENDORS, Recipe
from runners.paged_kv import PagedKV

#: (model, batch size) → tiles by time, fastest first.
TILES: dict[tuple[str, int], list[AttentionTile]] = {}


def bandwidth() -> None:
    """A copy of 4 GiB, bytes read plus bytes written, best of many."""
    a = torch.empty(4 << 30, dtype=torch.uint8, device=DEVICE).random_()
    b = torch.empty_like(a)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
    b.copy_(a)
    for event in events:
        event.record()
        b.copy_(a)
    torch.cuda.synchronize()
    best = min(x.elapsed_time(y) for x, y in pairwise(events))
    RESULTS["copy_tb_s"] = 2 * a.nbytes / best / 1e9
    print(f"   copy {RESULTS['copy_tb_s']:.2f} TB/s")


def time_product_choice(decoder: FusedDecoder, dims: Dims, all_rows: Sequence[int] = BATCHES) -> None:
    """Every product by every candidate, the fastest is kept; floor = weight bytes over bandwidth."""
    rows_out = RESULTS.setdefault("products", {}).setdefault(dims.name, [])
    products = decoder.products()
    for rows in all_rows:
        for record in decoder.choice.measure(products, rows, pdl=True):
            names = [name for name in (record.product, record.timed_with) if name]
            floor = sum(products[name][0].weight.nbytes for name in names) / RESULTS["copy_tb_s"] / 1e6
            rows_out.append(asdict(record) | {"floor_us": floor})
            ranked = sorted(record.candidate_us.items(), key=lambda item: item[1])
            print(
                f"   {dims.name} m={rows:3d} {record.product:7s} floor {floor:5.1f} cublas"
                f" {record.candidate_us.get(str(VENDOR), 0):5.1f} | " + ", ".join(f"{n} {t:.1f}" for n, t in ranked[:4])
                + (f" ERRORS {len(record.errors)}: {next(iter(record.errors.items()))}" if record.errors else ""),
                flush=True,
            )  # fmt: skip


def time_attention(dims: Dims) -> None:
    """Every tile in turn over 12 layers, the projections already there."""
    layers = 12
    kv = make_kv(dims, 128, CONTEXT, layers)
    backend = triton_backend(dims, kv, 128)
    norms = torch.ones(dims.head_dim, dtype=torch.bfloat16, device=DEVICE)
    cos_sin = torch.ones(4096, dims.head_dim, device=DEVICE)
    out = RESULTS.setdefault("attention", {}).setdefault(dims.name, {})
    for bs in BATCHES:
        # Different requests turn by turn, so that a small batch does not find its keys in the L2 cache.
        turns = min(8, max(2, 128 // bs)) if bs < 32 else 1
        batches = [
            decode_batch(kv, [1 + (t * bs + i) % 128 for i in range(bs)], [CONTEXT] * bs, 100)
            for t in range(turns)
        ]
        floor = bs * CONTEXT * dims.kv_heads * dims.head_dim * 4 / RESULTS["copy_tb_s"] / 1e6
        qkv = torch.randn(bs, dims.layout.num_heads * dims.head_dim, dtype=torch.bfloat16, device=DEVICE)

        def run(qkv: torch.Tensor = qkv, batches: list[ForwardBatch] = batches) -> None:
            for batch in batches:
                for layer in range(layers):
                    inputs = HeadInputs(dims.layout, norms, norms, cos_sin, batch.positions)
                    caches = AttentionLayer(0, kv.k_cache[layer], kv.v_cache[layer])
                    backend.attend_fused(qkv, inputs, caches, batch)

        times = _time_tiles(backend, bs, run, turns * layers)
        names = {str(tile): tile for tile in attention_tiles(bs)}
        ranked = sorted((t, n) for n, t in times.items() if n in names)
        TILES[dims.name, bs] = [names[n] for _, n in ranked]
        with part(f"flashinfer {dims.name} bs {bs}"):
            times |= time_flashinfer(dims, kv, bs, layers)
        out[bs] = {"floor_us": floor, "times_us": times}
        everything = sorted((t, n) for n, t in times.items())
        print(
            f"   {dims.name} attention bs={bs} floor {floor:.1f}: "
            + ", ".join(f"{n} {t:.1f}" for t, n in everything),
            flush=True,
        )


def _time_tiles(
    backend: TritonAttentionBackend, bs: int, run: Callable[[], None], launches: int
) -> dict[str, float]:
    times: dict[str, float] = {}
    for pdl in (True, False):
        for tile in attention_tiles(bs):
            if not pdl and str(tile) != min(times, key=lambda name: times[name]):
                continue
            backend.pdl, backend.tiles[bs] = pdl, tile
            try:
                times[str(tile) + ("" if pdl else " no pdl")] = time_in_graph(run, 5) / launches
            except Exception as error:
                RESULTS["errors"][f"attention {bs} {tile}"] = str(error)[:200]
    return times


class StepTimer:
    """Whole steps of one model at one batch size."""

    def __init__(
        self,
        decoder: FusedDecoder,
        dims: Dims,
        kv: PagedKV,
        backend: TritonAttentionBackend,
        bs: int,
    ) -> None:
        self.decoder, self.dims, self.backend, self.bs, self.kv = decoder, dims, backend, bs, kv
        self.batch = decode_batch(kv, list(range(1, bs + 1)), [CONTEXT] * bs, dims.vocab)

    def run(self) -> Any:
        return run_step(self.decoder, self.backend, self.kv, self.batch)

    def ms(self, pdl: bool, replays: int = 30) -> float:
        self.decoder.pdl = self.backend.pdl = pdl
        return time_in_graph(self.run, replays) / 1000

    def tune(self) -> tuple[float, dict[str, str]]:
        """Try the best few of each part within the step, one part after another."""
        recipes, bs = self.decoder.choice.recipes, self.bs
        best = self.ms(True, 8)
        for tile in TILES.get((self.dims.name, bs), [])[:3]:
            kept = self.backend.tiles[bs]
            self.backend.tiles[bs] = tile
            took = self.ms(True, 8)
            if took < best:
                best = took
            else:
                self.backend.tiles[bs] = kept
        products = self.decoder.products()
        for name in ("gate_up", "qkv", "down", "output"):
            rows = RESULTS["products"][self.dims.name]
            times = next(r["candidate_us"] for r in rows if r["product"] == name and r["num_rows"] == bs)
            by_name: dict[str, Recipe] = {str(r): r for r in (*VENDORS, *candidates(products[name][0], bs))}
            for text in sorted(times, key=lambda text: times[text])[:4]:
                kept_recipe = recipes[name, bs]
                recipes[name, bs] = by_name[text]
                took = self.ms(True, 8)
                if took < best:
                    best = took
                else:
                    recipes[name, bs] = kept_recipe
        chosen = {name: str(recipes[name, bs]) for name in products}
        return best, chosen | {"attention": str(self.backend.tiles[bs])}


def time_steps(decoder: FusedDecoder, dims: Dims) -> None:
    """Whole steps in one CUDA graph each, back to back, beside the memory floor."""
    kv = make_kv(dims, max(BATCHES), CONTEXT, dims.layers)
    backend = triton_backend(dims, kv, max(BATCHES))
    weights = sum(p.nbytes for p in {p.data_ptr(): p for p in decoder.parameters()}.values())
    if not dims.tied:
        assert decoder.embedding is not None
        weights -= decoder.embedding.nbytes
    token_bytes = dims.layers * dims.kv_heads * dims.head_dim * 4
    for bs in BATCHES:
        row: dict[str, Any] = {
            "floor_ms": (weights + bs * CONTEXT * token_bytes) / RESULTS["copy_tb_s"] / 1e9
        }
        RESULTS.setdefault("steps", {}).setdefault(dims.name, {})[bs] = row
        if TILES.get((dims.name, bs)):
            backend.tiles[bs] = TILES[dims.name, bs][0]
        timer = StepTimer(decoder, dims, kv, backend, bs)
        with part(f"step {dims.name} bs {bs}"):
            row["ms_first"] = timer.ms(True)
            row["ms_tuned"], row["chosen"] = timer.tune()
            row["ms"], row["ms_no_pdl"] = timer.ms(True), timer.ms(False)
            print(f"   {dims.name} bs {bs} {row['ms']:.3f} {row['chosen']}", flush=True)
        with part(f"profile {dims.name} bs {bs}"):
            decoder.pdl = backend.pdl = False
            row["kernels_us"] = profile_step(timer.run)
        measured = dict(decoder.choice.recipes)
        with part(f"step {dims.name} bs {bs} cublas"):
            decoder.choice.recipes.clear()
            row["ms_cublas"] = timer.ms(True)
        decoder.choice.recipes.update(measured)


def profile_step(run: Callable[[], Any]) -> dict[str, list[float]]:
    """Kernel → [launches, microseconds] of one step, without dependent launch so that times add up."""
    graph = torch.cuda.CUDAGraph()
    run()
    with torch.cuda.graph(graph):
        run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    found = [(e.key[:48], e.count / 3, e.device_time_total / 3) for e in profiler.key_averages()]
    return {name: [count, took] for name, count, took in sorted(found, key=lambda row: -row[2])[:14]}
