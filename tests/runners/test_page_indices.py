"""The packed page lists that FlashInfer's kernels read, by the torch twin of the Triton kernel."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from runners.attention.page_indices import PageIndices, write_page_indices

CPU = torch.device("cpu")


def packed(page_size: int, table: torch.Tensor, rows: list[int], lens: list[int]) -> PageIndices:
    out = PageIndices.allocate(max_batch_size=8, max_pages=table.shape[1], device=CPU)
    int32 = {"dtype": torch.int32}
    write_page_indices(out, table, torch.tensor(rows, **int32), torch.tensor(lens, **int32), page_size)
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
