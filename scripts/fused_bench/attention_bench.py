"""Attention by variant, checked and timed: `bench_fused.py OUT.json --only attention`.

A variant is timed within a chain of merged projection, attention and output projection over all layers of
a model, by the recipes of the shipped table and with programmatic dependent launch, less the same chain
without attention: what a step pays for it.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fused_bench.compile_ahead import compile_product, shape_product
from fused_bench.flashinfer_times import time_flashinfer
from fused_bench.rig import ALL_DIMS, DEVICE, RESULTS, Dims, decode_batch, make_kv, part, triton_backend
from fused_bench.tiles import striped_tiles
from runners.attention.base import AttentionLayer
from runners.attention.triton_backend import AttentionTile, TritonAttentionBackend
from runners.models.fused.gemm_choice import bucket, time_in_graph
from runners.models.fused.qk_rope_cache import HeadInputs
from runners.models.fused.recipe import VENDOR, Recipe, run_product
from runners.models.fused.skinny_gemm import Product, Rows
from runners.models.fused.tuning import WinnerTable, recipe_of, table_path
from runners.paged_kv import PagedKV
from tests.runners.attention_case import DTYPE, LENGTHS, Shape, check_tile

BATCHES = (32, 8, 128, 1, 256)
CONTEXTS = (512, 128, 2048)
#: Width of the sums of squares in the chain: what every product reads, so that it is compiled once.
_SQUARES = 64
_PRODUCTS = ("qkv", "output")


@dataclass(frozen=True)
class Sizes:
    """What is measured; smaller in a dry run."""

    dims: tuple[Dims, ...]
    batches: tuple[int, ...] = BATCHES
    contexts: tuple[int, ...] = CONTEXTS
    replays: int = 7
    workers: int = 15
    lengths: tuple[int, ...] = LENGTHS


def shipped_table() -> WinnerTable:
    """The table of this device; without one every product is the vendor's."""
    if DEVICE.type != "cuda":
        return WinnerTable()
    name = torch.cuda.get_device_name(DEVICE)
    path = table_path(name, torch.cuda.get_device_capability(DEVICE))
    return WinnerTable.read(path) if path.exists() else WinnerTable()


def old_tile(table: WinnerTable, dims: Dims, bs: int) -> AttentionTile | None:
    """What the shipped table says now."""
    entry = table.attention_entry(dims.heads, dims.kv_heads, dims.head_dim, bs)
    return None if entry is None else AttentionTile(**entry["tile"])


def chain_recipe(table: WinnerTable, dims: Dims, name: str, bs: int) -> Recipe:
    """The recipe of one of the chain's products."""
    n, k = dims.shapes()[name]
    entry = table.product(name, shape_product(name, n, k, dims.tied), bucket(bs) or bs)
    return VENDOR if entry is None else recipe_of(entry)


# --- checks, in processes that fill Triton's cache --------------------------------------------------


def check_all(sizes: Sizes, deadline: float) -> set[tuple[str, AttentionTile]]:
    """Compile and check every variant; the ones that passed, by model."""
    jobs = [
        replace(job, lengths=sizes.lengths) if isinstance(job, CheckJob) else job
        for job in _check_jobs(sizes)
    ]
    passed: set[tuple[str, AttentionTile]] = set()
    rows = RESULTS.setdefault("attention_checks", [])
    if sizes.workers == 0:
        _take(map(_run_job, jobs), rows, passed)
        return passed
    context = multiprocessing.get_context("spawn")
    # An illegal access fails all that follows in its process: those that met a CUDA error get a new one each.
    for tasks in (None, 1):
        if not jobs:
            break
        with context.Pool(min(sizes.workers, len(jobs)), _prepare_worker, maxtasksperchild=tasks) as pool:
            results = pool.imap_unordered(_run_job, jobs, chunksize=1)
            done = _take((results.next(max(1.0, deadline - time.time())) for _ in list(jobs)), rows, passed)
        jobs = [job for job, outcome in done if "CUDA error" in outcome["bad"]]
    return passed


def _take(results: Any, rows: list[Any], passed: set[tuple[str, AttentionTile]]) -> list[Any]:
    done = []
    try:
        for job, outcome in results:
            done.append((job, outcome))
            row = {"job": str(job), **outcome}
            rows.append(row)
            if isinstance(job, CheckJob):
                row |= {"tile": asdict(job.tile), "shape": asdict(job.shape)}
                if not outcome["bad"] and job.model is not None:
                    passed.add((job.model, job.tile))
            if outcome["bad"]:
                print(f"   !! {job}: {outcome['bad']}", flush=True)
    except multiprocessing.TimeoutError:
        print("   !! checks not done in time: what was not checked is not timed", flush=True)
    return done


@dataclass(frozen=True)
class CheckJob:
    """One tile on one shape. `model` names the dims whose shape it is, None for a shape of its own."""

    model: str | None
    shape: Shape
    tile: AttentionTile
    #: Also without dependent launch, for the same bits: another compile.
    both: bool
    lengths: tuple[int, ...] = LENGTHS

    def __str__(self) -> str:
        return f"{self.model or self.shape} {self.tile}"


@dataclass(frozen=True)
class ProductJob:
    """One product of the chain, to be compiled."""

    dims: Dims
    name: str
    rows: int
    recipe: Recipe

    def __str__(self) -> str:
        return f"{self.dims.name} {self.name} {self.rows} rows {self.recipe}"


def _check_jobs(sizes: Sizes) -> Iterator[CheckJob | ProductJob]:
    table = shipped_table()
    for dims in sizes.dims:
        shape = Shape(dims.heads, dims.kv_heads, dims.head_dim)
        old = [old_tile(table, dims, bs) for bs in sizes.batches]
        tiles = [tile for bs in sizes.batches for tile in striped_tiles(bs)]
        for index, tile in enumerate(dict.fromkeys([*filter(None, old), *tiles])):
            yield CheckJob(dims.name, shape, tile, both=index % 5 == 0)
    # Shapes that no model of the benchmark has.
    base, some = Shape(9, 3, 64, page_size=1), AttentionTile(4, 16, 4, 3, heads=2, min_span=32)
    yield CheckJob(None, base, some, True)
    yield CheckJob(None, replace(base, page_size=32, has_norm=False), replace(some, heads=1), False)
    yield CheckJob(
        None, Shape(16, 8, 128, window=100, soft_cap=20.0), replace(some, heads=8, num_warps=8), False
    )
    yield CheckJob(
        None, Shape(16, 8, 128, page_size=32, window=37, fused=False), replace(some, splits=1), False
    )
    yield CheckJob(None, Shape(32, 2, 128), replace(some, heads=2, registers=160), False)
    for dims in sizes.dims:
        for name in _PRODUCTS:
            recipes = {chain_recipe(table, dims, name, bs): bs for bs in sizes.batches}
            for recipe, bs in recipes.items():
                yield ProductJob(dims, name, bs, recipe)


def _prepare_worker() -> None:
    torch.set_num_threads(1)


def _run_job(job: CheckJob | ProductJob) -> tuple[CheckJob | ProductJob, dict[str, Any]]:
    started = time.perf_counter()
    try:
        if isinstance(job, CheckJob):
            outcome = check_tile(job.shape, job.tile, job.both, job.lengths)
        else:
            n, k = job.dims.shapes()[job.name]
            compile_product((job.name, n, k, job.dims.tied, job.rows, job.recipe, _SQUARES, True))
            outcome = {"bad": ""}
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        outcome = {"bad": f"{type(error).__name__}: {str(error)[:160]} ({where.name}:{where.lineno})"}
    return job, outcome | {"seconds": round(time.perf_counter() - started, 2)}


# --- times ------------------------------------------------------------------------------------------


class Chain:
    """Merged projection, attention and output projection of every layer of a model."""

    def __init__(self, dims: Dims, kv: PagedKV, table: WinnerTable) -> None:
        self.dims, self.kv, self.table = dims, kv, table
        self.products = {name: [self._product(name) for _ in range(dims.layers)] for name in _PRODUCTS}
        self.norm = torch.ones(dims.head_dim, dtype=DTYPE, device=DEVICE)
        self.cos_sin = torch.ones(kv.max_seq_len, dims.head_dim, device=DEVICE)

    def _product(self, name: str) -> Product:
        n, k = self.dims.shapes()[name]
        weight = torch.empty(n, k, dtype=DTYPE, device=DEVICE).normal_(std=k**-0.5)
        return shape_product(name, n, k, self.dims.tied, weight)

    def at(self, bs: int, context: int) -> Callable[[TritonAttentionBackend | None], Callable[[], None]]:
        """How to run the chain with a backend, or with None without attention."""
        dims, pdl = self.dims, DEVICE.type == "cuda"
        recipes = {name: chain_recipe(self.table, dims, name, bs) for name in _PRODUCTS}
        batch = decode_batch(self.kv, list(range(1, bs + 1)), [context] * bs, 100)
        inputs = HeadInputs(dims.layout, self.norm, self.norm, self.cos_sin, batch.positions)
        x = torch.randn(bs, dims.hidden, dtype=DTYPE, device=DEVICE)
        start = Rows(x, torch.ones(bs, _SQUARES, device=DEVICE))
        fixed = torch.randn(bs, dims.heads * dims.head_dim, dtype=DTYPE, device=DEVICE)

        def run(backend: TritonAttentionBackend | None) -> None:
            for layer in range(dims.layers):
                qkv = run_product(start, self.products["qkv"][layer], recipes["qkv"], pdl=pdl).rows.x
                heads = fixed
                if backend is not None:
                    caches = AttentionLayer(0, self.kv.k_cache[layer], self.kv.v_cache[layer])
                    heads = backend.attend_fused(qkv, inputs, caches, batch).flatten(1)
                output = self.products["output"][layer]
                run_product(Rows(heads), output, recipes["output"], residual=x, pdl=pdl)

        return lambda backend: lambda: run(backend)


def time_run(run: Callable[[], None], replays: int) -> float:
    """Microseconds of a replay; in a dry run on a CPU of one call."""
    if DEVICE.type == "cuda":
        return time_in_graph(run, replays)
    started = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - started)


def time_variants(sizes: Sizes, passed: set[tuple[str, AttentionTile]], deadline: float) -> None:
    """Every variant that passed, in every cell of batch, context and model; most wanted cells first."""
    table = shipped_table()
    most = max(sizes.dims, key=lambda dims: dims.layers)
    kv = make_kv(most, max(sizes.batches), max(sizes.contexts), most.layers, DTYPE)
    chains = {dims.name: Chain(dims, kv, table) for dims in sizes.dims}
    out: dict[str, Any] = RESULTS.setdefault("attention_cells", {})
    for context in sizes.contexts:
        for bs in sizes.batches:
            for dims in sizes.dims:
                name = f"{dims.name} bs {bs} context {context}"
                if time.time() > deadline:
                    RESULTS["errors"][name] = "left out: out of time"
                    continue
                with part(name, quiet=True):
                    out[name] = _time_cell(chains[dims.name], bs, context, sizes, passed)
    for dims in sizes.dims:
        if time.time() < deadline and 128 in sizes.batches:
            with part(f"flashinfer {dims.name}", quiet=True):
                RESULTS.setdefault("flashinfer_128", {})[dims.name] = time_flashinfer(
                    dims, kv, 128, dims.layers
                )


def _time_cell(
    chain: Chain, bs: int, context: int, sizes: Sizes, passed: set[tuple[str, AttentionTile]]
) -> dict[str, Any]:
    dims, run = chain.dims, chain.at(bs, context)
    backend = triton_backend(dims, chain.kv, bs)
    backend.pdl = DEVICE.type == "cuda"
    old = old_tile(chain.table, dims, bs)
    tiles = [tile for tile in striped_tiles(bs) if (dims.name, tile) in passed]
    chain_us = {"": time_run(run(None), sizes.replays)}
    errors = {}
    for tile in [*([old] if old else []), *tiles, *([old] if old else [])]:
        backend.tiles[bs] = tile
        name = str(tile) if str(tile) not in chain_us else f"{tile} again"
        try:
            chain_us[name] = time_run(run(backend), sizes.replays)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {str(error)[:160]}"
    again = time_run(run(None), sizes.replays)
    without = min(chain_us.pop(""), again)
    floor = bs * context * dims.kv_heads * dims.head_dim * 4 / RESULTS.get("copy_tb_s", 4.25) / 1e6
    return {
        "model": dims.name, "batch_size": bs, "context_len": context, "floor_us": floor, "layers": dims.layers,
        "without_us": without, "without_again_us": again, "old": str(old),
        "attention_us": {name: (took - without) / dims.layers for name, took in chain_us.items()},
        "tiles": {str(tile): asdict(tile) for tile in [*([old] if old else []), *tiles]}, "errors": errors,
    }  # fmt: skip


def print_attention_table() -> None:
    """The cells, best variants first."""
    checks = RESULTS.get("attention_checks", [])
    bad = [row for row in checks if row["bad"]]
    print(f"\nchecks: {len(checks)} done, {len(bad)} bad; copy {RESULTS.get('copy_tb_s', 0):.2f} TB/s")
    for row in bad[:20]:
        print(f"  {row['job']}: {row['bad'][:150]}")
    print("us of one attention in the chain; floor, old kernel (twice), then the best six")
    for cell in RESULTS.get("attention_cells", {}).values():
        times = dict(cell["attention_us"])
        olds = [times.pop(name) for name in (cell["old"], f"{cell['old']} again") if name in times]
        ranked = sorted((took, name) for name, took in times.items())
        print(
            f"{cell['model']:5s} bs {cell['batch_size']:3d} ctx {cell['context_len']:4d} floor {cell['floor_us']:6.1f}"
            f" old {' '.join(f'{took:.1f}' for took in olds)} | "
            + ", ".join(f"{name} {took:.1f}" for took, name in ranked[:6])
            + (f" ERRORS {len(cell['errors'])}" if cell["errors"] else "")
        )
    print("flashinfer, batch 128, context 512:", RESULTS.get("flashinfer_128"))


def bench_attention(dims: list[Dims], seconds: float, dry_run: bool) -> None:
    """Check, then time, within `seconds`."""
    started = time.time()
    sizes = Sizes(tuple(dims))
    if dry_run:
        tiny = replace(ALL_DIMS["0.6b"], hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16)
        sizes = Sizes((tiny,), batches=(1,), contexts=(40,), replays=1, workers=0, lengths=(1, 17, 40))
    passed: set[tuple[str, AttentionTile]] = set()
    with part("checks"):
        passed |= check_all(sizes, started + 0.6 * seconds)
    with part("times"):
        time_variants(sizes, passed, started + seconds)
