"""The attention by fragments as far as a CPU can see it: what Python says of the source is what the source says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runners.attention import fragment_attention
from runners.attention.base import AttentionGroup, AttentionLayer
from runners.attention.fragment_attention import FragmentAttentionTile, attend_fragments
from runners.models.fused import nvrtc
from runners.models.fused.qk_rope_cache import HeadInputs, QkvLayout
from tests.runners.kernel_source import argument_types, constants, needs_nvrtc, offsets

SOURCE = fragment_attention._SOURCE
HEADER = SOURCE.with_name("attention_warp.cuh")
DEFINES = {
    "ELEMENT": 0, "KV_HEADS": 8, "GROUP": 2, "PAGE_SIZE": 16, "WARPS": 4, "STAGES": 3, "SPLITS": 2, "MIN_CTAS": 2,
    "HAS_NORM": 1, "PDL": 1,
}  # fmt: skip
TILES = [FragmentAttentionTile(1, 4, 3), FragmentAttentionTile(8, 1, 4, 6), FragmentAttentionTile(2, 8, 2, 1)]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("group", [1, 2, 4])
def test_shared_memory_holds_what_the_source_lays_out(tile: FragmentAttentionTile, group: int) -> None:
    numbers = {"GROUP": group, "WARPS": tile.warps, "STAGES": tile.stages, "SPLITS": tile.splits}
    size = constants(HEADER, DEFINES | numbers)
    ring, parts, spans = offsets(
        SOURCE,
        size,
        r"float\* parts = reinterpret_cast<float\*>\(shared \+ (.*?)\);",
        r"float\* spans = parts \+ (.*?);",
        r"u64\* barriers = reinterpret_cast<u64\*>\(spans \+ (.*?)\);",
    )
    barriers = 8 * tile.warps * tile.stages
    assert tile.shared_bytes(group) == ring + 4 * (parts + spans) + barriers
    # Bulk copies take 16 bytes or a multiple, from such addresses to such addresses; a barrier lies at one of 8.
    assert all(size[name] % 16 == 0 for name in ("KEY_BYTES", "VALUE_BYTES", "WARP_BYTES"))
    assert (ring + 4 * (parts + spans)) % 8 == 0


def test_arguments_are_those_of_the_source_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(nvrtc, "launch_cuda", lambda *a, **k: calls.append((a, k)))
    some, numbers = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int32)
    cache = torch.zeros(4, 16, 8, 128, dtype=torch.bfloat16)
    inputs = HeadInputs(QkvLayout(16, 8, 128, 1e-6), some, some, torch.zeros(9, 128), numbers)
    batch = SimpleNamespace(req_pool_indices=numbers, seq_lens=numbers, out_cache_loc=numbers)
    qkv, table = torch.zeros(3, 32 * 128, dtype=torch.bfloat16), torch.zeros(5, 7, dtype=torch.int32)
    tile = FragmentAttentionTile(2, 4, 3)
    group, layer = AttentionGroup(16, 8, 128, 0.1), AttentionLayer(0, cache, cache)
    out = attend_fragments(qkv, inputs, group, layer, batch, table, tile, pdl=True)  # type: ignore[arg-type]
    ((source, name, defines, arguments), options) = calls[0]
    assert (source, name, defines, out.shape) == (SOURCE, "fragment_attention", DEFINES, (3, 16, 128))
    assert [type(argument) for argument in arguments] == argument_types(SOURCE, "fragment_attention")
    assert (options["grid"], options["threads"], options["cluster"], options["pdl"]) == (48, 128, 2, True)


@needs_nvrtc
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_the_source_compiles(tile: FragmentAttentionTile) -> None:
    numbers = {"WARPS": tile.warps, "STAGES": tile.stages, "SPLITS": tile.splits, "MIN_CTAS": tile.min_ctas}
    cubin = nvrtc.compile_cubin(SOURCE, "sm_90", tuple((DEFINES | numbers).items()))
    assert cubin.startswith(b"\x7fELF")
