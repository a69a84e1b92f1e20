"""A host buffer is not written again while a queued copy may still read it."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runners import staging
from runners.models.fused import nvrtc
from runners.staging import CopyFences, Upload
from tests.runners.kernel_source import needs_nvrtc


class QueuedCopy:
    """An event of a copy that has not run yet: waiting for it runs it."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.is_queued = False

    def record(self) -> None:
        self.is_queued = True

    def synchronize(self) -> None:
        self.log.append("wait")
        self.is_queued = False

    def query(self) -> bool:
        return not self.is_queued


def fences(depth: int) -> tuple[CopyFences, list[str], list[QueuedCopy]]:
    made, log = CopyFences(depth, torch.device("cpu")), []  # type: tuple[CopyFences, list[str]]
    events = [QueuedCopy(log) for _ in range(depth)]
    made._events = events  # type: ignore[assignment]
    return made, log, events


def test_a_buffer_is_waited_for_before_it_is_written_again() -> None:
    made, log, _ = fences(3)
    turns = [made.next_turn() for _ in range(6)]
    assert sorted(turns[:3]) == [0, 1, 2] and turns[3:] == turns[:3]
    assert log == ["wait"] * 3, "the first turns have nothing to wait for"


def test_a_buffer_that_was_seen_free_when_the_turn_before_was_settled_is_not_waited_for() -> None:
    made, log, events = fences(3)
    turns = [made.next_turn() for _ in range(3)]
    events[turns[0]].is_queued = False  # its copy has run
    made.settle()
    assert made.next_turn() == turns[0] and log == []
    made.settle()
    events[turns[1]].is_queued = False  # too late: nobody asked again
    assert made.next_turn() == turns[1] and log == ["wait"]


@given(st.integers(1, 4), st.lists(st.sampled_from(["turn", "settle", "run"]), max_size=40))
def test_whatever_comes_between_no_buffer_is_handed_out_while_a_copy_from_it_is_queued(
    depth: int, actions: list[str]
) -> None:
    made, _, events = fences(depth)
    for action in actions:
        if action == "turn":
            assert not events[made.next_turn()].is_queued
        elif action == "settle":
            made.settle()
        else:  # the device runs what is queued
            for event in events:
                event.is_queued = False


def test_a_turn_is_settled_once_at_the_latest_when_the_next_begins() -> None:
    made, _, events = fences(2)
    first = made.next_turn()
    assert not events[first].is_queued
    made.settle()
    assert events[first].is_queued
    events[first].is_queued = False
    made.next_turn()  # settled already: not recorded a second time
    assert not events[first].is_queued
    second = made.next_turn()
    assert second == first and events[1 - first].is_queued


def test_an_upload_brings_what_the_source_holds_when_it_is_queued() -> None:
    source, target = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    upload = Upload(target, source)
    assert upload.way == "torch"
    for _ in range(2):
        upload.queue()
        assert torch.equal(target, source)
        source.add_(1)


# --- the kernel --------------------------------------------------------------------------------


def emulated_launch(function: int, *rest: Any) -> int:
    """Do by the C arguments of `cuLaunchKernel` what the kernel does thread by thread, on host memory."""
    grid, _, _, threads, _, _, _, _, parameters, _ = rest
    target, source, num_words = (ctypes.c_uint64.from_address(parameters[i]).value for i in range(3))
    for word in range(grid * threads):
        if word < num_words:
            ctypes.memmove(target + 16 * word, source + 16 * word, 16)
    return 0


LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p,
)(emulated_launch)  # fmt: skip


@pytest.mark.parametrize("num_words", [1, 48, 127, 128, 129, 576])
def test_the_launch_covers_every_byte_and_none_behind(num_words: int) -> None:
    source = torch.arange(16 * num_words + 16).to(torch.uint8)
    target = torch.zeros_like(source)
    values = (target.data_ptr(), source.data_ptr(), num_words)
    arguments = staging.launch_arguments(7, -(-num_words // 128), 128, values, ctypes.c_void_p(0))
    # The parameters behind the addresses are read at each launch: they live as long as the arguments.
    for _ in range(2):
        assert LAUNCH(*arguments) == 0
        assert torch.equal(target[:-16], source[:-16]) and not target[-16:].any()
        source.add_(1)


@pytest.mark.parametrize(
    ("numbers", "fits"),
    [
        ((4096, 512, 9216), True),
        ((4096, 520, 9216), False),
        ((4096, 512, 36), False),
        ((4096, 512, 0), False),
    ],
)
def test_only_whole_words_at_addresses_of_words_are_for_the_kernel(
    numbers: tuple[int, ...], fits: bool
) -> None:
    assert staging._is_in_words(*numbers) == fits


def test_without_the_bindings_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "is_available", lambda: False)
    assert staging.load_kernel.__wrapped__(staging._SOURCE, "upload", torch.device("cuda", 0)) is None


def test_a_kernel_that_the_compiler_refuses_leaves_the_copy_to_the_copy_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("NVRTC refused upload.cu: it does not know sm_999")

    monkeypatch.setattr(nvrtc, "is_available", lambda: True)
    monkeypatch.setattr(nvrtc, "load_function", refuse)
    assert staging.load_kernel.__wrapped__(staging._SOURCE, "upload", torch.device("cuda", 0)) is None


@needs_nvrtc
def test_the_kernel_compiles() -> None:
    assert nvrtc.compile_cubin(staging._SOURCE, "sm_90", ()).startswith(b"\x7fELF")
