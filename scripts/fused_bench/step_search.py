"""A whole step whose parts can be replaced, and the search for its fastest parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from fused_bench.attention_bench import time_run
from fused_bench.compile_ahead import shape_product
from fused_bench.rig import CONTEXT, DEVICE, Dims, decode_batch, run_step, triton_backend
from runners.attention.fragment_attention import FragmentAttentionTile
from runners.attention.triton_backend import AttentionTile, default_tile, tile_of
from runners.models.fused.fragment_gemm import FragmentTile
from runners.models.fused.gemm_choice import PRODUCTS, bucket
from runners.models.fused.recipe import VENDOR, Recipe
from runners.models.fused.tuning import WinnerTable, recipe_of
from runners.paged_kv import PagedKV

_REPLAYS = 8
#: Tokens a request holds in the steps by which attention is chosen: a graph keeps its tile for all of them.
CONTEXTS = (128, 512, 512, 2048)

Variant = Recipe | AttentionTile | FragmentAttentionTile


def shipped(table: WinnerTable, dims: Dims, rows: int) -> dict[str, Variant]:
    """What the table has the step made of."""
    m, found = bucket(rows) or rows, {}
    for name, (n, k) in dims.shapes().items():
        entry = table.product(name, shape_product(name, n, k, dims.tied), m)
        found[name] = VENDOR if entry is None else recipe_of(entry)
    entry = table.attention_entry(dims.heads, dims.kv_heads, dims.head_dim, m)
    return found | {
        "attention": default_tile(rows, dims.kv_heads) if entry is None else tile_of(entry["tile"])
    }


class Step:
    """A whole step at one number of rows, whose parts can be replaced."""

    def __init__(self, dims: Dims, decoder: Any, kv: PagedKV, table: WinnerTable, rows: int) -> None:
        self.dims, self.decoder, self.kv, self.rows = dims, decoder, kv, rows
        self.batches = {
            context: decode_batch(kv, list(range(1, rows + 1)), [context] * rows, dims.vocab)
            for context in dict.fromkeys(CONTEXTS)
            if context <= kv.max_seq_len
        }
        self.backend = triton_backend(dims, kv, rows)
        self.recipes: dict[tuple[str, int], Recipe] = decoder.choice.recipes
        self.set(shipped(table, dims, rows))

    def choice(self) -> dict[str, Variant]:
        """What the step is made of."""
        return {name: self.recipes[name, self.rows] for name in PRODUCTS} | {
            "attention": self.backend.tile(self.rows)
        }

    def set(self, choice: Mapping[str, Any]) -> None:
        for name, value in choice.items():
            if name == "attention":
                self.backend.tiles[self.rows] = value
            else:
                self.recipes[name, self.rows] = value

    def run(self, context: int = CONTEXT) -> Any:
        return run_step(self.decoder, self.backend, self.kv, self.batches[context])

    def ms(self, replays: int = _REPLAYS, context: int = CONTEXT) -> float:
        self.decoder.pdl = self.backend.pdl = DEVICE.type == "cuda"
        return time_run(lambda: self.run(context), replays) / 1000

    def mean_ms(self, replays: int = _REPLAYS) -> float:
        """The geometric mean over the contexts."""
        ms = {context: self.ms(replays, context) for context in self.batches}
        return math.prod(ms.get(context, ms[CONTEXT]) for context in CONTEXTS) ** (1 / len(CONTEXTS))

    def same_bits(self) -> bool:
        outs = []
        for pdl in (False, True, True):
            self.decoder.pdl = self.backend.pdl = pdl and DEVICE.type == "cuda"
            outs.append(self.run().logits.clone())
        return all(torch.equal(outs[0], out) for out in outs[1:])


def search(step: Step, variants: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Replace one part after another by its variants; keep the fastest. Then the best few again.

    A kernel may pay only beside others of its kind, which leave it room on a multiprocessor ahead of its wait:
    so all of it once more from a step of fragment kernels, and the faster of the two is the winner.
    """
    before = step.choice()
    row: dict[str, Any] = {"before": {k: str(v) for k, v in before.items()}, "before_ms": step.ms(30)}
    ms_by_part: dict[str, dict[str, float]] = {name: {} for name in variants}
    errors: dict[str, str] = {}
    _sweep(step, variants, ms_by_part, errors, _REPLAYS)
    few = {name: _fastest(some, ms_by_part[name]) for name, some in variants.items()}
    _sweep(step, few, ms_by_part, errors, 2 * _REPLAYS)
    after, after_ms = step.choice(), step.ms(30)
    fragments = {name: next(filter(_is_fragment, some), None) for name, some in few.items()}
    if any(fragments.values()):
        step.set({name: variant for name, variant in fragments.items() if variant is not None})
        _sweep(step, few, ms_by_part, errors, 2 * _REPLAYS)
        _sweep(step, few, ms_by_part, errors, 2 * _REPLAYS)
        row["from_fragments_ms"] = step.ms(30)
        if row["from_fragments_ms"] < after_ms:
            after = step.choice()
    step.set(after)
    row["after_ms"] = step.ms(30)
    row["same_bits"] = step.same_bits()
    step.set(before)
    row["before_again_ms"] = step.ms(30)
    step.set(after)
    row["after_again_ms"] = step.ms(30)
    row["after"] = {name: str(value) for name, value in after.items()}
    row["tiles"] = {name: _tile_dict(value) for name, value in after.items()}
    return row | {"ms_by_part": ms_by_part, "errors": errors}


def _sweep(
    step: Step,
    variants: Mapping[str, list[Any]],
    ms_by_part: Mapping[str, dict[str, float]],
    errors: dict[str, str],
    replays: int,
) -> None:
    for name, some in variants.items():
        measure, times = step.mean_ms if name == "attention" else step.ms, ms_by_part[name]
        kept, best = step.choice()[name], measure(replays)
        times.setdefault(str(kept), best)
        for variant in some:
            step.set({name: variant})
            try:
                took = measure(replays)
            except Exception as error:  # A variant that does not fit the device is a row, not a failure.
                errors[f"{name} {variant}"] = f"{type(error).__name__}: {str(error)[:160]}"
                continue
            times[str(variant)] = min(took, times.get(str(variant), took))
            if took < best:
                best, kept = took, variant
        step.set({name: kept})


def _fastest(some: list[Any], times: Mapping[str, float]) -> list[Any]:
    """The fastest three, and the fastest two fragment kernels."""
    ranked = sorted((variant for variant in some if str(variant) in times), key=lambda v: times[str(v)])
    return [*dict.fromkeys([*ranked[:3], *list(filter(_is_fragment, ranked))[:2]])]


def _is_fragment(variant: Variant) -> bool:
    tile = variant.tile if isinstance(variant, Recipe) else variant
    return isinstance(tile, FragmentTile | FragmentAttentionTile)


def _tile_dict(value: Any) -> dict[str, Any] | None:
    tile = value.tile if isinstance(value, Recipe) else value
    return None if tile is None else asdict(tile)
