"""Our decode attention by Triton's interpreter; `tests/gpu/test_decode_attention.py` has it compiled."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import replace

import pytest
import torch

from runners.attention.base import AttentionGroup
from runners.attention.torch_backend import TorchAttentionBackend
from runners.attention.triton_backend import AttentionTile, TritonAttentionBackend, default_tile
from runners.errors import PlanLayoutError
from runners.forward_batch import ForwardMode
from runners.paged_kv import PagedKV
from tests.runners.attention_case import Shape, check_tile
from tests.runners.interpreter import interpreter, needs_interpreter

SHAPE = Shape(4, 2, 16)
STRIPED = AttentionTile(2, 16, 2, 2, heads=1, min_span=16)
LENGTHS = (1, 17, 65)


@pytest.fixture(scope="module")
def kernels() -> Iterator[Executor]:
    with interpreter() as pool:
        yield pool


def _bad(kernels: Executor, shape: Shape, tile: AttentionTile) -> object:
    return kernels.submit(check_tile, shape, tile, False, LENGTHS).result()["bad"]


@needs_interpreter
@pytest.mark.parametrize(
    "tile",
    [
        STRIPED,
        replace(STRIPED, heads=2),
        replace(STRIPED, splits=1, num_warps=4),
        replace(STRIPED, splits=4, heads=8),
        AttentionTile(2, 16, 4, 2),
    ],
    ids=str,
)
def test_every_tile_attends_to_all_tokens_and_no_free_slot(kernels: Executor, tile: AttentionTile) -> None:
    assert not _bad(kernels, SHAPE, tile)


@needs_interpreter
@pytest.mark.parametrize(
    "shape",
    [
        replace(SHAPE, page_size=1),
        replace(SHAPE, page_size=32, has_norm=False),
        replace(SHAPE, heads=9, kv_heads=3),
        replace(SHAPE, window=20, soft_cap=5.0),
        replace(SHAPE, window=7, fused=False),
    ],
    ids=str,
)
def test_every_option_of_a_model_and_its_cache(kernels: Executor, shape: Shape) -> None:
    assert not _bad(kernels, shape, STRIPED)


def test_without_a_measurement_small_batches_are_cut_into_spans() -> None:
    assert [default_tile(rows, 8).splits for rows in (1, 2, 8, 32, 256)] == [16, 16, 4, 1, 1]
    assert default_tile(256, 8).heads > default_tile(32, 8).heads
    assert all(default_tile(rows, 8, 1024).stages == 2 for rows in (1, 8, 256))


def test_a_replay_refuses_a_request_longer_than_the_page_table() -> None:
    group, device = AttentionGroup(1, 1, 16, 1.0), torch.device("cpu")
    sizes = {"num_pages": 8, "page_size": 16, "max_requests": 2, "max_seq_len": 40}
    kv = PagedKV([group], **sizes, dtype=torch.float32, device=device)
    limits = {"max_batch_size": 2, "max_seq_len": 40}
    prefill = TorchAttentionBackend([group], kv, **limits, device=device)
    backend = TritonAttentionBackend([group], kv, prefill, **limits, device=device)

    def replay(*lens: int) -> None:
        lens_cpu = torch.tensor(lens, dtype=torch.int32)
        backend.init_forward_metadata_replay_cuda_graph(
            2, lens_cpu, lens_cpu, sum(lens), ForwardMode.DECODE, lens_cpu
        )

    replay(1, 40)
    with pytest.raises(PlanLayoutError, match="41 tokens.*max_seq_len=40"):
        replay(41, 3)
