"""FlashInfer's workspaces are large enough for what its scheduler asks, and refused when they are not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.attention.base import AttentionGroup
from runners.attention.flashinfer_workspace import (
    check_workspace,
    float_workspace_bytes,
    int_workspace_bytes,
    prefill_token_limit,
)
from runners.errors import RunnerError

GROUPS = st.sampled_from([(16, 8), (32, 8), (32, 32), (14, 2), (64, 1), (9, 3)])


def group(heads: tuple[int, int], head_dim: int = 128) -> AttentionGroup:
    return AttentionGroup(*heads, head_dim, sm_scale=1.0)


@given(
    heads=GROUPS,
    batch=st.integers(1, 512),
    blocks=st.integers(1, 16),
    sms=st.integers(16, 160),
)
def test_the_split_decode_of_any_occupancy_fits(
    heads: tuple[int, int], batch: int, blocks: int, sms: int
) -> None:
    """As `DecodePlanImpl` in a CUDA graph: a partial output and a log-sum for each resident block."""
    num_qo, num_kv = heads
    if batch * num_kv >= blocks * sms:
        return  # enough blocks without splitting
    items = blocks * sms // num_kv
    needed = num_qo * items * 128 * 4 + num_qo * items * 4
    assert float_workspace_bytes(group(heads), batch, sms) >= needed
    assert int_workspace_bytes(group(heads), batch, 512, sms) >= 13 * items + 4 * (items + 2)


@given(heads=GROUPS, batch=st.integers(1, 512), sms=st.integers(16, 160))
def test_the_tensor_core_decode_fits(heads: tuple[int, int], batch: int, sms: int) -> None:
    """As `PrefillPlanImpl` for one token a request, without the division by the group size."""
    num_qo, num_kv = heads
    group_size = num_qo // num_kv
    tile = 16 if group_size <= 16 else 64
    items = max(2 * sms // num_kv, -(-batch * group_size // tile) + batch - 1)
    needed = num_qo * items * tile * (128 + 1) * 4
    assert float_workspace_bytes(group(heads), batch, sms) >= needed


@given(heads=GROUPS, rows=st.integers(1, 8192), batch=st.integers(1, 64))
def test_the_schedule_of_any_prefill_fits(heads: tuple[int, int], rows: int, batch: int) -> None:
    num_qo, num_kv = heads
    tiles = -(-rows * (num_qo // num_kv) // 16) + batch - 1
    fa2 = 13 * max(tiles, 264 // num_kv) + 4 * (batch + 1) + 4 * (rows + 1) + 4
    fa3 = 4 * (7 * num_qo * (-(-rows // 128) + batch - 1) + 133)
    assert int_workspace_bytes(group(heads), batch, rows, 132) >= max(fa2, fa3)


def test_36_sizes_share_megabytes_where_each_wrapper_would_bring_eight() -> None:
    assert int_workspace_bytes(group((16, 8)), 256, prefill_token_limit(256, 4096), 132) < 2 * 2**20


def test_a_workspace_that_is_too_small_is_refused_with_the_size_needed() -> None:
    with pytest.raises(RunnerError, match=r"1,000 bytes is too small.*need 2,000 bytes"):
        check_workspace(2000, 0, max_batch_size=8, workspace_bytes=1000, free_bytes=None)


def test_a_workspace_that_does_not_fit_the_device_is_refused_with_the_size_needed() -> None:
    with pytest.raises(RunnerError, match=r"need 3,000 bytes, but 2,999 are free"):
        check_workspace(2000, 1000, max_batch_size=8, workspace_bytes=None, free_bytes=2999)


def test_a_workspace_that_fits_is_taken() -> None:
    check_workspace(2000, 1000, max_batch_size=8, workspace_bytes=2500, free_bytes=3500)
