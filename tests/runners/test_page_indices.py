"""The packed page lists that FlashInfer's kernels read, by the torch twin of the Triton kernel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runners.attention.page_indices import PageIndices, write_page_indices, write_page_indices_torch
from tests.runners.interpreter import interpreter, needs_interpreter

CPU = torch.device("cpu")


def packed(
    page_size: int, table: torch.Tensor, rows: list[int], lens: list[int], slots: torch.Tensor | None = None
) -> PageIndices:
    out = PageIndices.allocate(max_batch_size=8, max_pages=table.shape[1], device=CPU)
    int32 = {"dtype": torch.int32}
    write_page_indices(out, table, torch.tensor(rows, **int32), torch.tensor(lens, **int32), page_size, slots)
    return out


@given(
    page_size=st.sampled_from([1, 16, 32]),
    data=st.data(),
)
def test_the_lists_are_those_of_a_loop_over_the_requests(page_size: int, data: st.DataObject) -> None:
    table = torch.randperm(9 * 6, dtype=torch.int32).view(9, 6)
    lens = data.draw(st.lists(st.integers(1, 6 * page_size), min_size=1, max_size=8))
    rows = data.draw(st.permutations(range(9)))[: len(lens)]
    out = packed(page_size, table, rows, lens)
    start = 0
    for i, (row, length) in enumerate(zip(rows, lens, strict=True)):
        pages = -(-length // page_size)
        assert out.indptr[i] == start
        assert out.indices[start : start + pages].tolist() == table[row, :pages].tolist()
        assert out.last_page_len[i] == length - (pages - 1) * page_size
        start += pages
    assert out.indptr[len(lens)] == start


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_last_page_is_that_of_the_newest_token_and_need_not_be_in_the_table(page_size: int) -> None:
    table = torch.randperm(9 * 6, dtype=torch.int32).view(9, 6) + 1
    rows, lens = [4, 2, 7, 0], [3 * page_size + 1, 2 * page_size, 1, 1]
    known = packed(page_size, table, rows, lens)
    last = (torch.tensor(lens) - 1) // page_size
    slots = table[torch.tensor(rows), last].long() * page_size + (torch.tensor(lens) - 1) % page_size
    slots[3] = 0  # a padding row's: the table says which page
    for row, column in list(zip(rows, last.tolist(), strict=True))[:3]:
        table[row, column] = 0
    found = packed(page_size, table, rows, lens, slots)
    assert torch.equal(found.indices, known.indices) and torch.equal(found.indptr, known.indptr)


def test_a_full_last_page_counts_all_its_tokens() -> None:
    table = torch.arange(4, dtype=torch.int32).view(1, 4)
    out = packed(16, table, rows=[0, 0], lens=[32, 33])
    assert out.last_page_len[:2].tolist() == [16, 1]
    assert out.indptr[:3].tolist() == [0, 2, 5]


def test_padding_rows_own_one_page_each() -> None:
    table = torch.tensor([[0, 0], [3, 4]], dtype=torch.int32)
    out = packed(16, table, rows=[1, 0, 0], lens=[17, 1, 1])
    assert out.indices[:4].tolist() == [3, 4, 0, 0]
    assert out.indptr[:4].tolist() == [0, 2, 3, 4]


def kernel_equals_twin(page_size: int, has_slots: bool) -> bool:
    from runners.attention.triton_kernels import launch_page_indices

    kernel, twin = (PageIndices.allocate(max_batch_size=8, max_pages=300, device=CPU) for _ in range(2))
    table = torch.randperm(9 * 300, dtype=torch.int32).view(9, 300)
    lens = torch.tensor([1, page_size, 300 * page_size, page_size + 1, 1], dtype=torch.int32)
    rows = torch.tensor([3, 1, 8, 5, 0], dtype=torch.int32)
    slots = torch.tensor([7, 41, 1000, 2, 0]) * page_size if has_slots else None
    launch_page_indices(kernel, table, rows, lens, page_size, slots)
    write_page_indices_torch(twin, table, rows, lens, page_size, slots)
    return all(
        torch.equal(getattr(kernel, name), getattr(twin, name))
        for name in ("indptr", "indices", "last_page_len")
    )


@needs_interpreter
def test_the_kernel_writes_what_its_twin_does() -> None:
    with interpreter() as pool:
        for page_size in (1, 16):
            for has_slots in (False, True):
                assert pool.submit(kernel_equals_twin, page_size, has_slots).result()
