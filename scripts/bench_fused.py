"""Checks and times the fused layers on one GPU, with random weights; needs no checkpoint.

    python scripts/bench_fused.py OUT.json [--dims 0.6b 8b] [--seconds 100] [--only attention|products|steps]
    python scripts/bench_fused.py MEASURED.json --write-table runners/models/fused/tables/DEVICE.json

Each part prints its own failure and the rest goes on. Everything measured goes to OUT.json; the last
lines are a short table. Parts: products against float32 and whole layers against their plain twins
(with and without programmatic dependent launch), products by candidate, attention by tile, whole steps.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from fused_bench.attention_bench import bench_attention, print_attention_table
from fused_bench.checks import check_model, check_products
from fused_bench.compile_ahead import compile_ahead
from fused_bench.rig import ALL_DIMS, CONTEXT, RESULTS, Dims, part, random_decoder
from fused_bench.steps_bench import PARTS, ROWS, bench_steps
from fused_bench.timings import bandwidth, time_attention, time_product_choice, time_steps
from fused_bench.write_table import write_table

from runners.models.fused.gemm_choice import ROW_BUCKETS
from runners.models.fused.layers import FusedDecoder

#: Name, and what it does.
Part = tuple[str, Callable[[], object]]


def print_table() -> None:
    """What a reader wants first, last."""
    print(f"\ncopy {RESULTS.get('copy_tb_s', 0):.2f} TB/s; ms a step at context {CONTEXT}")
    for name, check in RESULTS.get("check_products", {}).items():
        print(
            f"products {name}: {check['count']} checked, worst {check['worst']:.5f}, bad {len(check['bad'])}"
        )
    print("model check:", RESULTS.get("model_check"))
    print("dims  bs  floor   pdl  ratio  untuned no-pdl  cublas")
    for name, rows in RESULTS.get("steps", {}).items():
        for bs, row in rows.items():
            ms = row.get("ms", float("nan"))
            rest = " ".join(
                f"{row.get(key, float('nan')):6.3f}" for key in ("ms_first", "ms_no_pdl", "ms_cublas")
            )
            print(f"{name:5s} {bs:3d} {row['floor_ms']:6.3f} {ms:6.3f} {ms / row['floor_ms']:5.2f} {rest}")
            print("      " + " ".join(f"{k}={v}" for k, v in row.get("chosen", {}).items()))
            kernels = list(row.get("kernels_us", {}).items())[:8]
            print("      " + "; ".join(f"{k[:22]} {int(c)}x{t / max(c, 1):.1f}" for k, (c, t) in kernels))
    print("errors:", list(RESULTS["errors"]))


def main() -> None:
    """Run the parts in order, until the time is up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="JSON file to write, or with --write-table to read")
    parser.add_argument("--dims", nargs="+", default=["0.6b", "8b"], choices=sorted(ALL_DIMS))
    parser.add_argument("--seconds", type=float, default=100, help="start no new part after this time")
    parser.add_argument(
        "--only",
        choices=["attention", "products", "steps"],
        help="variants of attention, products at all numbers of rows, or new products within whole steps",
    )
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="with steps: numbers of rows")
    parser.add_argument(
        "--parts", nargs="+", default=PARTS, choices=PARTS, help="with steps: what to replace"
    )
    parser.add_argument(
        "--write-table",
        type=Path,
        metavar="TABLE",
        help="measure nothing: write the winners of OUT.json into TABLE",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="with attention or steps: tiny, by Triton's interpreter"
    )
    args = parser.parse_args()
    if args.write_table:
        write_table(args.out, args.write_table)
        return
    start = time.time()
    torch.manual_seed(0)
    chosen = [ALL_DIMS[name] for name in args.dims]
    if not args.dry_run:
        RESULTS["environment"] = environment()
    if args.only == "products":
        run_parts(product_parts(chosen), start + args.seconds, args.out)
        return
    if args.only:
        if not args.dry_run:
            with part("bandwidth"):
                bandwidth()
        seconds = args.seconds - (time.time() - start)
        if args.only == "attention":
            bench_attention(chosen, seconds, args.dry_run)
            print_attention_table()
        else:
            bench_steps(chosen, tuple(args.rows), seconds, args.dry_run, args.parts)
        args.out.write_text(json.dumps(RESULTS, indent=1, default=str))
        print(
            "errors:",
            {name: str(text).strip().splitlines()[-1][:160] for name, text in RESULTS["errors"].items()},
        )
        return
    run_parts(all_parts(chosen), start + args.seconds, args.out)
    print_table()


def environment() -> dict[str, Any]:
    """What a table of this run says of where it was made."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {
        "device": torch.cuda.get_device_name(),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions,
        "context_len": CONTEXT,
    }


def product_parts(chosen: list[Dims]) -> list[Part]:
    """The products at every number of rows that a choice is made for."""

    def products(dims: Dims) -> None:
        time_product_choice(random_decoder(dims), dims, ROW_BUCKETS)
        torch.cuda.empty_cache()

    return [
        ("bandwidth", bandwidth),
        ("compile", lambda: print("  ", compile_ahead(chosen, ROW_BUCKETS, for_checks=False))),
        *[(f"products {dims.name}", lambda d=dims: products(d)) for dims in chosen],
    ]


def all_parts(chosen: list[Dims]) -> list[Part]:
    """Everything but the variants of attention."""
    decoders: dict[str, FusedDecoder] = {}

    def build(dims: Dims) -> None:
        decoders[dims.name] = random_decoder(dims)

    def drop(dims: Dims) -> None:
        decoders.pop(dims.name, None)
        torch.cuda.empty_cache()

    parts: list[Part] = [
        ("bandwidth", bandwidth),
        ("compile", lambda: print("  ", compile_ahead(chosen))),
        *[(f"check products {d.name}", lambda d=d: check_products(d)) for d in chosen],
        ("check model", check_model),
    ]
    for dims in chosen:
        parts += [
            (f"build {dims.name}", lambda d=dims: build(d)),
            (f"attention {dims.name}", lambda d=dims: time_attention(d)),
            (f"products {dims.name}", lambda d=dims: time_product_choice(decoders[d.name], d)),
            (f"steps {dims.name}", lambda d=dims: time_steps(decoders[d.name], d)),
            (f"drop {dims.name}", lambda d=dims: drop(d)),
        ]
    return parts


def run_parts(parts: list[Part], deadline: float, out: Path) -> None:
    """Run them in order; none begins after the deadline."""
    for name, run in parts:
        if time.time() > deadline:
            RESULTS["errors"][name] = "left out: out of time"
            continue
        with part(name):
            run()
        out.write_text(json.dumps(RESULTS, indent=1, default=str))


if __name__ == "__main__":
    main()
