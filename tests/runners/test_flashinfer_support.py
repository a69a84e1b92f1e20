"""What FlashInfer is asked to serve, on which kernels and on which of its versions."""

from __future__ import annotations

import importlib

import pytest
import torch

from runners.attention import flashinfer_adapter, flashinfer_support
from runners.attention.base import AttentionGroup
from runners.attention.flashinfer_adapter import KernelShape, may_use_private_parts, parse_version
from runners.attention.flashinfer_support import (
    choose_tensor_cores,
    prefill_candidates,
    unusable_reason,
    without_idle_window,
)
from runners.errors import RunnerError


def group(num_qo_heads: int = 16, num_kv_heads: int = 8, head_dim: int = 128, **options) -> AttentionGroup:
    return AttentionGroup(num_qo_heads, num_kv_heads, head_dim, sm_scale=head_dim**-0.5, **options)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_support, "is_installed", lambda: True)


@pytest.mark.parametrize("name", ["flashinfer_backend", "flashinfer_adapter", "flashinfer_support"])
def test_the_modules_import_without_flashinfer_and_without_cuda(name: str) -> None:
    assert importlib.import_module(f"runners.attention.{name}")


@pytest.mark.parametrize(
    ("text", "version"),
    [("0.6.13", (0, 6, 13)), ("0.7.0.post1", (0, 7, 0)), ("0.8", (0, 8, 0)), ("0.7.4rc1+cu130", (0, 7, 4))],
)
def test_a_version_is_its_first_three_numbers(text: str, version: tuple[int, int, int]) -> None:
    assert parse_version(text) == version


def test_a_name_that_is_no_version_is_refused() -> None:
    with pytest.raises(RunnerError, match="unknown"):
        parse_version("unknown")


@pytest.mark.parametrize("version", [(0, 6, 13), (0, 7, 1), (0, 7, 4), (0, 7, 99)])
def test_private_parts_are_used_where_they_were_read(version: tuple[int, int, int]) -> None:
    assert may_use_private_parts(version)


def test_a_later_version_is_driven_by_public_calls() -> None:
    assert not may_use_private_parts((0, 8, 0))


def test_an_older_version_is_refused_with_the_remedy() -> None:
    with pytest.raises(RunnerError, match=r"0\.6\.12 is older than 0\.6\.13.*attention\.backend=torch"):
        may_use_private_parts((0, 6, 12))


def test_a_missing_flashinfer_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_adapter, "is_installed", lambda: False)
    with pytest.raises(RunnerError, match=r"not installed.*cudagraph-harness\[gpu\]"):
        flashinfer_adapter.FlashInfer()


def test_a_window_counts_the_query_and_flashinfer_does_not() -> None:
    shape = KernelShape(group(sliding_window=128), 16, torch.bfloat16, torch.bfloat16)
    assert shape.options()["window_left"] == 127


def test_full_attention_has_no_window_and_no_cap() -> None:
    options = KernelShape(group(), 16, torch.bfloat16, torch.bfloat16).options()
    assert (options["window_left"], options["logits_soft_cap"]) == (-1, 0.0)


def test_a_window_that_no_request_outgrows_is_full_attention() -> None:
    assert without_idle_window(group(sliding_window=4096), 4096).sliding_window is None
    assert without_idle_window(group(sliding_window=4096), 4097).sliding_window == 4096


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dtype", "on"),
    [
        (16, 8, torch.bfloat16, False),
        (32, 8, torch.bfloat16, True),
        (14, 2, torch.float16, True),
        (16, 16, torch.bfloat16, False),
        (16, 8, torch.float8_e4m3fn, True),
        (10, 2, torch.bfloat16, True),
    ],
)
def test_auto_takes_tensor_cores_where_they_win(
    heads: int, kv_heads: int, dtype: torch.dtype, on: bool
) -> None:
    assert choose_tensor_cores(group(heads, kv_heads), dtype, "auto") is on


def test_tensor_cores_can_be_forced_and_forbidden() -> None:
    assert choose_tensor_cores(group(16, 8), torch.bfloat16, "always")
    assert not choose_tensor_cores(group(32, 8), torch.bfloat16, "never")


def test_forbidding_tensor_cores_is_refused_where_nothing_else_fits() -> None:
    with pytest.raises(ValueError, match="7 query heads a KV head"):
        choose_tensor_cores(group(14, 2), torch.bfloat16, "never")


def test_prefill_prefers_fa3_on_hopper_only() -> None:
    assert prefill_candidates(torch.bfloat16, (9, 0)) == ["fa3", "fa2"]
    assert prefill_candidates(torch.bfloat16, (8, 0)) == ["fa2"]
    assert prefill_candidates(torch.float8_e4m3fn, (9, 0)) == ["fa2"]


def test_float32_is_refused(installed: None) -> None:
    reason = unusable_reason([group()], torch.float32)
    assert reason is not None and "torch.float32" in reason


def test_an_odd_head_size_is_refused(installed: None) -> None:
    reason = unusable_reason([group(head_dim=80)], torch.bfloat16)
    assert reason is not None and "head_dim=80" in reason


def test_a_cache_of_another_16_bit_type_is_refused(installed: None) -> None:
    assert unusable_reason([group()], torch.float16, torch.bfloat16) is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_16_and_8_bit_caches_are_served(installed: None, dtype: torch.dtype) -> None:
    assert unusable_reason([group()], dtype) is None
