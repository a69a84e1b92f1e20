"""The head's logits land in the caller's buffer where that is possible, and are the same everywhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runners.models.head_output import head_writes_to


def head_of(bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 32, bias=bias).requires_grad_(False)


def test_a_plain_head_writes_to_the_buffer_what_it_would_have_returned() -> None:
    head, hidden, output = head_of(), torch.randn(1, 5, 8), torch.zeros(5, 32)
    with head_writes_to(head, output):
        logits = head(hidden)
    assert logits.shape == (1, 5, 32) and logits.data_ptr() == output.data_ptr()
    torch.testing.assert_close(output, head(hidden)[0])


@pytest.mark.parametrize("rows", [4, 6])
def test_a_call_of_another_size_leaves_the_buffer_alone(rows: int) -> None:
    head, hidden, output = head_of(), torch.randn(1, rows, 8), torch.zeros(5, 32)
    with head_writes_to(head, output):
        assert torch.equal(head(hidden), nn.functional.linear(hidden, head.weight))
    assert not output.any()


@pytest.mark.parametrize("head", [None, head_of(bias=True), nn.Sequential(head_of())])
def test_any_other_head_is_called_as_it_is(head: nn.Module | None) -> None:
    output = torch.zeros(5, 32)
    with head_writes_to(head, output):
        if head is not None:
            head(torch.randn(5, 8))
    assert not output.any()


def test_the_head_is_itself_again_also_after_an_error() -> None:
    head = head_of()
    with pytest.raises(ZeroDivisionError), head_writes_to(head, torch.zeros(5, 32)):
        raise ZeroDivisionError
    assert "forward" not in head.__dict__
