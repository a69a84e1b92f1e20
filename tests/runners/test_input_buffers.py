"""The static inputs: contract 2, padding rows are valid whatever the step before had."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runners.attention.base import AttentionGroup
from runners.batches import decode_batch, fed_batch
from runners.errors import RunnerError
from runners.forward_batch import ForwardBatch, ForwardMode
from runners.input_buffers import InputBuffers
from runners.paged_kv import NULL_PAGE, PADDING_ROW, PagedKV
from runners.staging import WORD_BYTES

MAX_BS = 8
FILL = 1


class OnDevice(torch.Tensor):
    """A host tensor that says it is not one."""

    is_cpu = False  # type: ignore[assignment]


def make_buffers(max_bs: int = MAX_BS) -> InputBuffers:
    return InputBuffers(max_bs, FILL, torch.device("cpu"))


def make_batch(n: int, base: int = 100) -> ForwardBatch:
    def values(dtype: torch.dtype) -> torch.Tensor:
        return torch.arange(base, base + n, dtype=dtype)

    lens = values(torch.int32)
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=n,
        input_ids=values(torch.int64),
        positions=values(torch.int64),
        req_pool_indices=values(torch.int32),
        seq_lens=lens,
        seq_lens_cpu=lens,
        seq_lens_sum=int(lens.sum()),
        out_cache_loc=values(torch.int64),
    )


def rows_of(buffers: InputBuffers) -> dict[str, torch.Tensor]:
    return {name: getattr(buffers, name) for name in buffers.fills} | {"seq_lens_cpu": buffers.seq_lens_cpu}


def assert_padding_rows_hold_their_fill(buffers: InputBuffers, n: int) -> None:
    fills = {**buffers.fills, "seq_lens_cpu": FILL}
    for name, tensor in rows_of(buffers).items():
        assert (tensor[n:] == fills[name]).all(), name


def test_a_padding_row_is_a_request_of_the_declared_length_on_the_null_page() -> None:
    buffers = make_buffers()

    assert buffers.fills == {
        "input_ids": 0,
        "positions": FILL - 1,
        "out_cache_loc": NULL_PAGE,
        "req_pool_indices": PADDING_ROW,
        "seq_lens": FILL,
        "token_source": -1,
    }
    assert_padding_rows_hold_their_fill(buffers, 0)


def test_padding_rows_hold_their_fill_after_a_larger_batch() -> None:
    buffers = make_buffers()
    buffers.populate(make_batch(8))
    buffers.populate(make_batch(3))

    assert_padding_rows_hold_their_fill(buffers, 3)
    for name, tensor in rows_of(buffers).items():
        assert tensor[:3].tolist() == ([-1] * 3 if name == "token_source" else [100, 101, 102])


@given(st.lists(st.integers(0, MAX_BS), min_size=1, max_size=40))
def test_padding_rows_hold_their_fill_after_any_sequence_of_batches(sizes: list[int]) -> None:
    buffers = make_buffers()
    for step, n in enumerate(sizes):
        buffers.populate(make_batch(n, base=100 + step))
        assert_padding_rows_hold_their_fill(buffers, n)
        assert buffers.input_ids[:n].tolist() == list(range(100 + step, 100 + step + n))


def test_a_negative_slot_goes_to_the_null_page_and_never_wraps_round() -> None:
    buffers, batch = make_buffers(), make_batch(3)
    batch.out_cache_loc = torch.tensor([7, -1, 9])

    buffers.populate(batch)

    assert buffers.out_cache_loc[:3].tolist() == [7, NULL_PAGE, 9]


def made_batch(kv: PagedKV, n: int, is_fed: bool = False) -> ForwardBatch:
    """A step of `n` new requests, as `decode_batch` makes it."""
    rows = np.array([kv.add_request() for _ in range(n)], dtype=np.int32)
    lens = np.arange(3, n + 3, dtype=np.int32)
    assert all(kv.extend(int(row), int(length)) for row, length in zip(rows, lens, strict=True))
    source = np.arange(n, dtype=np.int32)[::-1] if is_fed else None
    return decode_batch(kv, rows, lens, np.arange(50, 50 + n), source)


def small_kv() -> PagedKV:
    sizes = {"num_pages": 64, "page_size": 4, "max_requests": 16, "max_seq_len": 16}
    return PagedKV([AttentionGroup(1, 1, 2, 1.0)], **sizes, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("is_fed", [False, True])
def test_inputs_made_side_by_side_arrive_as_those_written_one_by_one(is_fed: bool) -> None:
    together, one_by_one, kv = make_buffers(), make_buffers(), small_kv()
    for n in (5, 2, 3):
        batch = made_batch(kv, n, is_fed)
        together.populate(batch)
        one_by_one.populate(replace(batch, host_rows=None))
        assert torch.equal(together.packed, one_by_one.packed)
        assert_padding_rows_hold_their_fill(together, n)


@pytest.mark.parametrize(
    "name", ["input_ids", "positions", "req_pool_indices", "out_cache_loc", "token_source"]
)
def test_an_input_that_was_replaced_counts_and_not_what_the_batch_was_made_from(name: str) -> None:
    buffers, batch = make_buffers(), made_batch(small_kv(), 3)
    setattr(batch, name, torch.tensor([4, 2, 3], dtype=getattr(buffers, name).dtype))
    buffers.populate(batch)
    assert getattr(buffers, name)[:3].tolist() == [4, 2, 3]


def test_a_fed_batch_brings_its_sources_and_leaves_the_other_as_it_was() -> None:
    buffers, batch = make_buffers(), made_batch(small_kv(), 3)
    buffers.populate(fed_batch(batch, np.array([2, -1, 0], dtype=np.int32)))
    assert buffers.token_source[:3].tolist() == [2, -1, 0]
    fed = buffers.packed.clone()
    buffers.populate(batch)
    assert buffers.token_source[:3].tolist() == [-1] * 3
    buffers.token_source[:3] = torch.tensor([2, -1, 0])
    assert torch.equal(buffers.packed, fed), "nothing but the sources differs"


def test_a_slot_that_was_made_negative_goes_to_the_null_page() -> None:
    buffers, batch = make_buffers(), made_batch(small_kv(), 2)
    batch.out_cache_loc[1] = -1
    buffers.populate(batch)
    assert buffers.out_cache_loc[:2].tolist() == [int(batch.out_cache_loc[0]), NULL_PAGE]


def test_slots_that_do_not_say_whether_they_were_written_to_are_looked_at() -> None:
    buffers = make_buffers()
    with torch.inference_mode():
        batch = made_batch(small_kv(), 2)
        batch.out_cache_loc[1] = -1
        buffers.populate(batch)
    assert buffers.out_cache_loc[:2].tolist() == [int(batch.out_cache_loc[0]), NULL_PAGE]


def test_a_fed_batch_counts_as_it_is_and_not_as_the_one_that_it_was_made_of() -> None:
    buffers, batch = make_buffers(), made_batch(small_kv(), 3)
    fed = fed_batch(batch, np.array([2, -1, 0], dtype=np.int32))
    batch.input_ids.fill_(1)
    fed.seq_lens[0] = 2
    buffers.populate(fed)
    assert buffers.input_ids[:3].tolist() == [50, 51, 52] and buffers.seq_lens[:3].tolist() == [2, 4, 5]


@pytest.mark.parametrize("name", ["seq_lens_cpu", "out_cache_loc"])
@pytest.mark.parametrize("is_fed", [False, True])
def test_a_batch_whose_lengths_or_slots_were_written_to_is_not_taken_for_one_as_it_was_made(
    name: str, is_fed: bool
) -> None:
    buffers, batch = make_buffers(), made_batch(small_kv(), 3)
    buffers.populate(batch)
    assert buffers.is_as_made
    getattr(batch, name)[1] = 9
    if is_fed:
        batch = fed_batch(batch, np.array([2, -1, 0], dtype=np.int32))
    buffers.populate(batch)
    assert not buffers.is_as_made
    assert rows_of(buffers)[name][1] == 9


def test_all_inputs_lie_in_one_packed_buffer() -> None:
    buffers = make_buffers(5)
    start, end = buffers.packed.data_ptr(), buffers.packed.data_ptr() + buffers.packed.nbytes

    tensors = [getattr(buffers, name) for name in buffers.fills]
    assert all(start <= t.data_ptr() and t.data_ptr() + t.nbytes <= end for t in tensors)
    padding = buffers.packed.nbytes - sum(t.nbytes for t in tensors)
    assert 0 <= padding < WORD_BYTES and buffers.packed.nbytes % WORD_BYTES == 0


def test_a_batch_larger_than_the_buffers_is_refused() -> None:
    with pytest.raises(RunnerError, match="9 requests does not fit the static inputs for 8"):
        make_buffers().populate(make_batch(9))


@pytest.mark.parametrize("name", ["input_ids", "positions", "req_pool_indices", "out_cache_loc"])
def test_an_input_of_another_length_is_refused_and_not_spread_over_the_rows(name: str) -> None:
    batch = make_batch(3)
    setattr(batch, name, getattr(batch, name)[:1])

    with pytest.raises(RunnerError, match=f"{name} has 1 entries for a decode batch of 3"):
        make_buffers().populate(batch)


def test_host_lengths_of_a_batch_outlive_the_next_batches() -> None:
    buffers = make_buffers()
    buffers.populate(make_batch(4, base=50))
    lens = buffers.seq_lens_cpu[:4]
    for step in range(6):
        buffers.populate(make_batch(4, base=200 + step))

    assert lens.tolist() == [50, 51, 52, 53]


def test_inputs_on_the_device_are_copied_there_and_their_padding_rows_stay() -> None:
    buffers, batch = make_buffers(), make_batch(3)
    buffers.populate(make_batch(8))
    batch.input_ids = batch.input_ids.as_subclass(OnDevice)
    batch.out_cache_loc = torch.tensor([5, -2, 6]).as_subclass(OnDevice)

    buffers.populate(batch)

    assert buffers.input_ids.tolist() == [100, 101, 102, 0, 0, 0, 0, 0]
    assert buffers.out_cache_loc.tolist() == [5, NULL_PAGE, 6, 0, 0, 0, 0, 0]
