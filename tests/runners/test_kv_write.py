"""Writing a step's keys and values to the cache, by the torch twin of the Triton kernel."""

from __future__ import annotations

import pytest
import torch

from runners.attention.kv_write import write_kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_each_token_lands_in_its_slot_and_nothing_else_changes(dtype: torch.dtype) -> None:
    k_cache, v_cache = (torch.zeros(3, 4, 2, 8).to(dtype) for _ in range(2))
    k, v = torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    write_kv(k_cache, v_cache, k, v, torch.tensor([9, 2]))
    for cache, states in ((k_cache, k), (v_cache, v)):
        lines = cache.float().flatten(0, 1)
        assert torch.equal(lines[[9, 2]], states.to(dtype).float())
        lines[[9, 2]] = 0
        assert not lines.any()


def test_a_negative_slot_does_not_wrap_round() -> None:
    k_cache, v_cache = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
    write_kv(k_cache, v_cache, torch.ones(1, 1, 8), torch.ones(1, 1, 8), torch.tensor([-1]))
    assert not k_cache.any() and not v_cache.any()
