"""A graph fetches the inputs that the host wrote for it, and leaves its ids on the host, however far the host is ahead."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runners.handover import CopyHandover, KernelHandover, create_handover
from runners.input_buffers import InputBuffers
from runners.models.fused import nvrtc
from runners.staging import CopyFences, load_kernel
from tests.runners.kernel_source import needs_nvrtc
from tests.runners.test_handover import fetched
from tests.runners.test_input_buffers import make_batch

#: The inputs of 8, 256 and 2048 requests: less than a CTA takes at once, and more.
NUM_BYTES = [288, 9216, 73_728]
DEPTH, NUM_IDS = 8, 40


def make(device: torch.device, num_bytes: int = 9216) -> KernelHandover:
    made = create_handover(torch.zeros(num_bytes, dtype=torch.uint8, device=device), DEPTH, NUM_IDS)
    assert isinstance(made, KernelHandover)
    return made


@needs_nvrtc
@pytest.mark.parametrize("num_bytes", NUM_BYTES)
def test_each_replay_fetches_what_the_host_wrote_for_it_and_brings_its_own_ids(
    device: torch.device, num_bytes: int
) -> None:
    """The host is several steps ahead, and writes the images again under fences, while graphs run."""
    num_steps = 400
    wanted = torch.randint(0, 256, (num_steps, num_bytes), dtype=torch.uint8)
    handover = make(device, num_bytes)
    seen = torch.zeros(num_steps, num_bytes, dtype=torch.uint8, device=device)
    step = torch.zeros(1, dtype=torch.int64, device=device)
    ids = torch.zeros(NUM_IDS, dtype=torch.int64, device=device)
    x = torch.zeros(1024, 1024, device=device)
    product = torch.empty_like(x)

    def work() -> None:
        handover.fetch()
        for _ in range(4):
            torch.mm(x, x, out=product)
        seen.index_copy_(0, step, handover._target.unsqueeze(0))
        torch.add(step.expand(NUM_IDS), torch.arange(NUM_IDS, device=device), out=ids)
        step.add_(1)
        handover.post(ids)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()  # what libraries do once is not for a capture
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        step.zero_()
        fences, events, answers, read = CopyFences(DEPTH, device), [], [], []
        torch.cuda._sleep(20_000_000)
        for number, row in enumerate(wanted):
            turn = fences.next_turn()
            handover.images[turn].copy_(row)
            wants_ids = number % 3 != 0
            handover.hand_in(turn, wants_ids)
            graph.replay()
            handover.note_launch()
            fences.settle()
            if wants_ids:
                events.append(torch.cuda.Event())
                events[-1].record()
                answers.append((number, handover.answer(NUM_IDS)))
            if len(events) > 2:  # steps later, as a loop with overlap reads them
                events.pop(0).synchronize()
                at, answer = answers.pop(0)
                read.append((at, answer.copy()))
        assert torch.equal(seen.cpu(), wanted)
    assert len(read) > num_steps // 2
    for number, answer in read:
        assert np.array_equal(answer, number + np.arange(NUM_IDS))


@needs_nvrtc
def test_without_a_new_image_the_target_stays_as_it_is(device: torch.device) -> None:
    handover = make(device)
    handover.images[3].fill_(5)
    handover.hand_in(3)
    handover.note_launch()
    assert fetched(handover) == 5
    handover._target.fill_(6)
    assert fetched(handover) == 6


@needs_nvrtc
def test_an_image_for_which_nothing_was_launched_is_taken_back(device: torch.device) -> None:
    handover = make(device)
    for turn in range(3):
        handover.images[turn].fill_(10 + turn)
    handover.hand_in(0)
    handover.note_launch()
    handover.hand_in(1)
    handover.hand_in(2)
    handover.note_launch()
    assert [fetched(handover) for _ in range(3)] == [10, 12, 12]


@needs_nvrtc
def test_an_image_that_is_there_already_is_left_alone_and_its_ids_are_posted(device: torch.device) -> None:
    handover = make(device)
    handover.images[0].fill_(5)
    handover.upload(0)
    handover._target.fill_(6)  # what was copied there on the device
    handover.hand_in(0, wants_ids=True, is_there=True)
    handover.note_launch()
    answer = handover.answer(1)
    handover.images[1].fill_(7)
    handover.hand_in(1)
    handover.note_launch()
    assert fetched(handover) == 6
    handover.post(torch.tensor([3], device=device))
    assert fetched(handover) == 7 and answer.tolist() == [3]


@needs_nvrtc
def test_turns_may_come_in_any_order(device: torch.device) -> None:
    handover, random = make(device), np.random.default_rng(0)
    for number in range(100):
        turns = random.permutation(DEPTH)[: 1 + number % DEPTH].tolist()
        for turn in turns:
            handover.images[turn].fill_(turn)
            handover.hand_in(turn)
            handover.note_launch()
        assert [fetched(handover) for _ in turns] == turns


@needs_nvrtc
@pytest.mark.parametrize("num_ids", [1, 33, NUM_IDS])
def test_ids_come_back_once_and_no_more_of_them_than_there_are(device: torch.device, num_ids: int) -> None:
    handover = make(device)
    handover.hand_in(0, wants_ids=True)
    handover.note_launch()
    handover.fetch()
    answer = handover.answer(NUM_IDS)
    for value in (7, 8):  # the second is a replay without a new image
        handover.post(torch.full((num_ids,), value, dtype=torch.int64, device=device))
    torch.cuda.synchronize()
    assert answer.tolist() == [7] * num_ids + [0] * (NUM_IDS - num_ids)


def test_a_device_without_the_kernels_gets_its_inputs_by_copies(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_kernel.cache_clear()
    monkeypatch.setattr(nvrtc, "is_available", lambda: False)
    try:
        buffers = InputBuffers(8, 1, device)
    finally:
        load_kernel.cache_clear()
    assert isinstance(buffers.handover, CopyHandover) and not buffers.handover.is_captured
    for n in (3, 8, 2):
        buffers.populate(make_batch(n), graph_follows=True, wants_ids=True)
        assert buffers.input_ids[:n].tolist() == list(range(100, 100 + n))
        buffers.settle()
