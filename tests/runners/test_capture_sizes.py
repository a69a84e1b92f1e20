"""The capture lists: today's schedules of the engines, and contract 1, coverage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.capture_sizes import POLICIES, capture_sizes

MAXIMA = [1, 2, 3, 4, 5, 7, 8, 12, 16, 20, 31, 33, 42, 64, 255, 256, 257, 300, 511, 512, 513, 700, 1024]


def test_the_gap_of_a_list_of_ones_own_is_closed_by_adding_the_maximum() -> None:
    warning = capture_sizes("explicit", 8, sizes=[1, 4], allow_gap=True).warning
    assert warning is not None and warning.endswith("add 8 to capture.sizes to capture the maximum too.")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("max_size", MAXIMA)
def test_every_list_is_sorted_unique_and_ends_exactly_at_the_maximum(policy: str, max_size: int) -> None:
    listed = capture_sizes(policy, max_size)

    assert list(listed.sizes) == sorted(set(listed.sizes))
    assert listed.sizes[0] >= 1
    assert listed.sizes[-1] == max_size
    assert len(listed.gap_batches) == 0 and listed.warning is None


@given(policy=st.sampled_from(list(POLICIES)), max_size=st.integers(1, 3000), allow_gap=st.booleans())
def test_no_size_is_ever_above_the_maximum(policy: str, max_size: int, allow_gap: bool) -> None:
    listed = capture_sizes(policy, max_size, allow_gap=allow_gap)

    assert all(1 <= size <= max_size for size in listed.sizes)
    assert list(listed.gap_batches) == list(range(listed.sizes[-1] + 1, max_size + 1))
    assert (listed.warning is None) == (len(listed.gap_batches) == 0)


@pytest.mark.parametrize(
    ("policy", "max_size", "end", "gap"),
    [
        ("vllm", 42, 40, range(41, 43)),
        ("vllm", 300, 288, range(289, 301)),
        ("pymllm", 700, 672, range(673, 701)),
        ("nano_vllm", 600, 512, range(513, 601)),
        ("mini_sglang", 12, 8, range(9, 13)),
        ("tgi", 64, 32, range(33, 65)),
    ],
)
def test_allow_gap_keeps_the_gap_of_the_engine_and_says_which_batches_it_costs(
    policy: str, max_size: int, end: int, gap: range
) -> None:
    listed = capture_sizes(policy, max_size, allow_gap=True)

    assert listed.sizes[-1] == end
    assert listed.gap_batches == gap
    assert listed.warning is not None
    assert f"{gap.start}..{max_size}" in listed.warning


@pytest.mark.parametrize("policy", ["sglang", "tensorrt_llm", "lmdeploy"])
def test_engines_that_append_the_ceiling_have_no_gap_of_their_own(policy: str) -> None:
    assert capture_sizes(policy, 300, allow_gap=True).sizes == capture_sizes(policy, 300).sizes


def test_schedules_are_those_of_the_named_releases() -> None:
    assert capture_sizes("vllm", 300).sizes == (1, 2, 4, *range(8, 256, 8), 256, 272, 288, 300)
    assert capture_sizes("sglang", 34).sizes == (1, 2, 4, 8, 12, 16, 24, 32, 34)
    assert capture_sizes("sglang", 600).sizes[-9:] == (432, 448, 464, 480, 496, 512, 544, 576, 600)
    assert capture_sizes("tensorrt_llm", 300).sizes == (1, 2, 4, *range(8, 129, 8), 192, 256, 300)
    assert capture_sizes("nano_vllm", 40).sizes == (1, 2, 4, 8, 16, 32, 40)
    assert capture_sizes("mini_sglang", 20).sizes == (1, 2, 4, 8, 16, 20)
    assert capture_sizes("lmdeploy", 900).sizes == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 900)
    assert capture_sizes("lmdeploy", 300).sizes == (1, 2, 4, 8, 16, 32, 64, 128, 256, 300)
    assert capture_sizes("tgi", 64).sizes == (1, 2, 4, 8, 16, 32, 64)
    assert capture_sizes("powers_of_two", 20).sizes == (1, 2, 4, 8, 16, 20)
    assert capture_sizes("all", 5).sizes == (1, 2, 3, 4, 5)
    assert capture_sizes("max_only", 7).sizes == (7,)


def test_each_engine_policy_names_the_release_that_it_follows() -> None:
    own = {"powers_of_two", "all", "max_only"}

    assert all(policy.engine_version for name, policy in POLICIES.items() if name not in own)


def test_explicit_list_is_sorted_and_deduplicated() -> None:
    assert capture_sizes("explicit", 8, sizes=[8, 1, 4, 4]).sizes == (1, 4, 8)


def test_explicit_list_with_a_gap_at_the_top_is_refused_unless_allowed() -> None:
    with pytest.raises(ValueError, match=r"batches 5\.\.8 have no graph: add 8"):
        capture_sizes("explicit", 8, sizes=[1, 4])

    listed = capture_sizes("explicit", 8, sizes=[1, 4], allow_gap=True)
    assert listed.sizes == (1, 4)
    assert listed.gap_batches == range(5, 9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "explicit", "max_size": 8, "sizes": [1, 16]}, r"\[16\], above the maximum of 8"),
        ({"policy": "explicit", "max_size": 8, "sizes": [0, 8]}, r"\[0\].*at least 1"),
        ({"policy": "explicit", "max_size": 8, "sizes": []}, "capture.sizes is empty"),
        ({"policy": "vllm", "max_size": 8, "sizes": [1]}, "goes with capture.policy=explicit"),
        ({"policy": "vllm", "max_size": 0}, "capture.max_size=0"),
        ({"policy": "vlm", "max_size": 8}, "capture.policy=vlm is unknown: choose from explicit, vllm"),
        ({"policy": "planned", "max_size": 8}, "read its sizes"),
    ],
)
def test_impossible_lists_are_refused_with_the_remedy(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        capture_sizes(**arguments)  # type: ignore[arg-type]
