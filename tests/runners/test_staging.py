"""A host buffer is not written again while a queued copy may still read it."""

from __future__ import annotations

import torch

from runners.staging import CopyFences, Upload


class QueuedCopy:
    """An event of a copy that has not run yet: waiting for it runs it."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.is_queued = False

    def record(self) -> None:
        self.is_queued = True

    def synchronize(self) -> None:
        self.log.append("wait" if self.is_queued else "free")
        self.is_queued = False


def fences(depth: int) -> tuple[CopyFences, list[str], list[QueuedCopy]]:
    made, log = CopyFences(depth, torch.device("cpu")), []  # type: tuple[CopyFences, list[str]]
    events = [QueuedCopy(log) for _ in range(depth)]
    made._events = events  # type: ignore[assignment]
    return made, log, events


def test_a_buffer_is_waited_for_before_it_is_written_again() -> None:
    made, log, _ = fences(3)
    turns = [made.next_turn() for _ in range(6)]
    assert sorted(turns[:3]) == [0, 1, 2] and turns[3:] == turns[:3]
    assert log == ["free"] * 3 + ["wait"] * 3


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
    for _ in range(2):
        upload.queue()
        assert torch.equal(target, source)
        source.add_(1)
