"""Products by variant, checked and timed within whole steps: `bench_fused.py OUT.json --only steps`.

A step is one CUDA graph of the whole model, by the recipes and attention tiles of the shipped table, with
programmatic dependent launch. One product after another is replaced by each of its variants, and the fastest
stays: so a variant is timed beside the kernels that it will run between. At the end the step by the table is
timed again, back to back with the step by the winners, whose logits must be the same without dependent launch.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from fused_bench.attention_bench import shipped_table
from fused_bench.compile_ahead import shape_product
from fused_bench.product_tiles import product_tiles
from fused_bench.rig import (
    ALL_DIMS,
    DEVICE,
    RESULTS,
    Dims,
    make_kv,
    part,
    random_decoder,
)
from fused_bench.step_search import CONTEXTS, Step, Variant, search, shipped
from runners.attention.fragment_attention import FragmentAttentionTile
from runners.models.fused.gemm_choice import PRODUCTS
from runners.models.fused.recipe import VENDOR, VENDORS, Recipe
from tests.runners.attention_case import DTYPE, Shape, check_tile
from tests.runners.product_case import check_product, random_product

ROWS = (32, 8, 128, 1)
PARTS = (*PRODUCTS, "attention")
#: Outputs of the head in the checks: the whole one would take the time of all the rest.
_HEAD_OUTPUTS = 8192
#: Attention beside the shipped tile: splits, warps, stages, CTAs of a multiprocessor.
_ATTENTION = (
    *((1, 4, 2, 3), (1, 4, 3, 2), (1, 8, 2, 1), (1, 8, 1, 3), (1, 2, 4, 3), (1, 2, 3, 4), (1, 2, 2, 6)),
    *((2, 4, 2, 3), (2, 4, 3, 2), (2, 8, 2, 1), (2, 8, 1, 3), (2, 2, 4, 3), (2, 2, 3, 4)),
    *((4, 4, 2, 3), (4, 4, 3, 2), (4, 2, 4, 3), (4, 2, 3, 4), (4, 8, 1, 3)),
    *((8, 4, 2, 3), (8, 2, 4, 3), (8, 2, 2, 6), (8, 1, 4, 6)),
)  # fmt: skip


@dataclass(frozen=True)
class Check:
    """One variant of one part, to be compiled and checked. `width` is that of the sums of squares."""

    dims: Dims
    name: str
    rows: int
    variant: Variant
    width: int = 64

    def __str__(self) -> str:
        return f"{self.dims.name} {self.name} m={self.rows} {self.variant} squares {self.width}"


def variants_of(dims: Dims, rows: int, parts: Container[str] = PARTS) -> dict[str, list[Variant]]:
    """What to time of each of the `parts`, in the order of the search."""
    shapes = dims.shapes()
    found: dict[str, list[Variant]] = {
        name: [*product_tiles(name, shape_product(name, *shapes[name], dims.tied), rows)] for name in PRODUCTS
    }
    found["attention"] = [FragmentAttentionTile(*numbers) for numbers in _ATTENTION]
    return {name: some for name, some in found.items() if name in parts}


def _checks(all_dims: list[Dims], all_rows: tuple[int, ...], parts: Container[str]) -> Iterator[Check]:
    """Most compiled first: what is left when the time is up is what was found slow before."""
    table = shipped_table()
    for rows in all_rows:
        for dims in all_dims:
            now, new = shipped(table, dims, rows), variants_of(dims, rows, parts)
            for name in new:
                for variant in dict.fromkeys([now[name], *new[name]]):
                    if variant != VENDOR:
                        for width in _widths(dims, name, rows):
                            yield Check(dims, name, rows, variant, width)


def _widths(dims: Dims, name: str, rows: int) -> tuple[int, ...]:
    """Widths of the sums of squares that a product may read: each is a compile."""
    if name not in ("qkv", "gate_up") or rows > 64:
        return (64,)
    if rows == 1:
        return (64, 256, 1024)
    # As many as an output or down projection in tiles of 32 leaves behind.
    return (64, 256) if dims.hidden // 32 > 64 else (64,)


def check(job: Check) -> str:
    """What is wrong with a variant, against float32 and against itself again; empty if nothing."""
    dims, name, rows = job.dims, job.name, job.rows
    if not isinstance(job.variant, Recipe):
        return str(check_tile(Shape(dims.heads, dims.kv_heads, dims.head_dim), job.variant, False)["bad"])
    torch.manual_seed(1)
    n, k = dims.shapes()[name]
    outputs = min(n, _HEAD_OUTPUTS) if name == "head" else n
    weight = random_product(outputs, k, "silu" if name == "gate_up" else "scaled").weight
    product = replace(shape_product(name, n, k, False, weight), norm=None)
    assert job.variant.tile is not None
    wrong = {
        m: check_product(product, job.variant.tile, m, job.width, pdl=DEVICE.type == "cuda")
        for m in dict.fromkeys((rows, max(1, rows - 3)))
    }
    return ", ".join(f"{bad} at {m} rows" for m, bad in wrong.items() if bad)


def _run_check(job: Check) -> tuple[Check, str]:
    torch.set_num_threads(1)
    try:
        return job, check(job)
    except Exception as error:
        return job, f"{type(error).__name__}: {str(error)[:160]}"


def check_all(jobs: list[Check], workers: int, deadline: float) -> set[tuple[str, str, int, Variant]]:
    """Compile and check every variant side by side; those that passed."""
    passed = {(job.dims.name, job.name, job.rows, job.variant) for job in jobs}
    rows: list[dict[str, str]] = RESULTS.setdefault("product_checks", [])
    waiting = dict.fromkeys(jobs)

    def take(results: Any) -> None:
        for job, bad in results:
            waiting.pop(job)
            if "CUDA error" in bad and workers:
                retry.append(job)
                continue
            rows.append({"job": str(job), "bad": bad})
            if bad:
                print(f"   !! {job}: {bad}", flush=True)
                passed.discard((job.dims.name, job.name, job.rows, job.variant))

    retry: list[Check] = []
    if workers == 0:
        take(map(_run_check, jobs))
    context = multiprocessing.get_context("spawn")
    # An illegal access fails all that follows in its process: those that met a CUDA error get a new one each.
    for tasks in (None, 1) if workers else ():
        work, retry = list(waiting) if tasks is None else retry, []
        waiting |= dict.fromkeys(work)
        if not work:
            break
        with context.Pool(min(workers, len(work)), maxtasksperchild=tasks) as pool:
            results = pool.imap_unordered(_run_check, work, chunksize=1)
            try:
                take(results.next(max(1.0, deadline - time.time())) for _ in work)
            except multiprocessing.TimeoutError:
                print(
                    f"   !! {len(waiting)} checks not done in time: what was not checked is not timed",
                    flush=True,
                )
                break
    for job in [*waiting, *retry]:
        passed.discard((job.dims.name, job.name, job.rows, job.variant))
    print(f"   {len(rows)} checked, {sum(bool(row['bad']) for row in rows)} bad", flush=True)
    return passed


def time_model(
    dims: Dims,
    rows: tuple[int, ...],
    passed: set[tuple[str, str, int, Variant]],
    deadline: float,
    parts: Container[str] = PARTS,
) -> None:
    """The search at each number of rows."""
    decoder, table = random_decoder(dims, DTYPE), shipped_table()
    kv = make_kv(dims, max(rows), max(CONTEXTS), dims.layers, DTYPE)
    out = RESULTS.setdefault("product_cells", {})
    for m in rows:
        name = f"{dims.name} {m} rows"
        if time.time() > deadline:
            RESULTS["errors"][name] = "left out: out of time"
            continue
        with part(name):
            step = Step(dims, decoder, kv, table, m)
            shipped_parts, variants = step.choice(), {}
            for part_name, found in variants_of(dims, m, parts).items():
                checked = [some for some in found if (dims.name, part_name, m, some) in passed]
                others = [] if part_name == "attention" else VENDORS
                variants[part_name] = [*dict.fromkeys([shipped_parts[part_name], *checked, *others])]
            out[name] = {"model": dims.name, "num_rows": m} | search(step, variants)
            _print_cell(name, out[name], dims)


def _print_cell(name: str, row: dict[str, Any], dims: Dims) -> None:
    print(
        f"{name}: before {row['before_ms']:.3f} {row['before_again_ms']:.3f} after {row['after_ms']:.3f}"
        f" {row['after_again_ms']:.3f} ms, same bits {row['same_bits']}, errors {len(row['errors'])}"
    )
    for product, times in row["ms_by_part"].items():
        count = 1 if product == "head" else dims.layers
        # Against the shipped one at its best, in microseconds of one kernel.
        start = times[row["before"][product]]
        ranked = sorted(times.items(), key=lambda item: item[1])[:5]
        print(
            f"   {product:9s} was {row['before'][product]} | "
            + ", ".join(f"{variant} {1000 * (ms - start) / count:+.2f}" for variant, ms in ranked),
            flush=True,
        )


def bench_steps(
    dims: list[Dims], all_rows: tuple[int, ...], seconds: float, dry_run: bool, parts: Container[str] = PARTS
) -> None:
    """Check, then time at each of `all_rows`, within `seconds`; `dry_run` on a tiny model, whose products a CPU computes otherwise."""
    started, workers = time.time(), 15
    if dry_run:
        tiny = replace(
            ALL_DIMS["0.6b"], hidden=64, layers=1, heads=4, kv_heads=2, head_dim=16, intermediate=64
        )
        dims, all_rows, workers = [replace(tiny, vocab=300)], (1,), 0
    with part("checks"):
        passed = check_all(list(_checks(dims, all_rows, parts)), workers, started + 0.5 * seconds)
    for index, some in enumerate(dims):
        # What is left is shared by the models that are left.
        until = time.time() + (started + seconds - time.time()) / (len(dims) - index)
        with part(some.name):
            time_model(some, all_rows, passed, until, parts)
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
