"""Page counts on the host: what a FlashInfer plan is made from."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runners.attention.host_pages import HostPages
from runners.attention.page_indices import PageIndices, write_page_indices
from runners.errors import PlanLayoutError


@given(page_size=st.sampled_from([1, 7, 16, 32]), data=st.data())
def test_the_host_plans_for_the_lists_that_the_device_makes(page_size: int, data: st.DataObject) -> None:
    lens = torch.tensor(
        data.draw(st.lists(st.integers(1, 4 * page_size), min_size=1, max_size=5)), dtype=torch.int32
    )
    n = len(lens)
    host = HostPages(max_batch_size=5, page_size=page_size, max_pages=4)
    host.count(lens)
    host.lay_out()
    device = PageIndices.allocate(5, 4, torch.device("cpu"))
    table = torch.zeros(1, 4, dtype=torch.int32)
    write_page_indices(device, table, torch.zeros(n, dtype=torch.int32), lens, page_size)
    assert torch.equal(host.indptr, device.indptr[: n + 1])
    assert torch.equal(host.last_page_len, device.last_page_len[:n])


def test_a_smaller_batch_leaves_nothing_of_the_larger_one() -> None:
    host = HostPages(max_batch_size=4, page_size=16, max_pages=8)
    for lens in ([100, 90, 80, 70], [17]):
        host.count(torch.tensor(lens, dtype=torch.int32))
        host.lay_out()
    assert host.indptr.tolist() == [0, 2]
    assert host.last_page_len.tolist() == [1]
    assert host.counts.tolist() == [2]


def test_a_request_longer_than_the_page_table_is_refused() -> None:
    host = HostPages(max_batch_size=2, page_size=16, max_pages=2)
    host.count(torch.tensor([32, 33], dtype=torch.int32))
    with pytest.raises(PlanLayoutError, match="33 tokens.*at most 32"):
        host.lay_out()
