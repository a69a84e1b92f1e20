"""Each step gets the inputs that the host wrote for it, however far the host is ahead, and its ids come back once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runners import handover as handover_module
from runners.handover import MAX_DEPTH, NUM_ANSWERS, TorchHandover, create_handover
from runners.input_buffers import InputBuffers
from runners.models.fused import nvrtc
from runners.padding import StepPlan
from tests.runners.kernel_source import needs_nvrtc
from tests.runners.past_only import PastOnlyBackend, runners_attend_with
from tests.runners.test_input_buffers import make_batch
from tests.runners.tiny_runner import Requests, tiny_runner

DEPTH = 4


def make(num_ids: int = 3) -> TorchHandover:
    made = create_handover(torch.zeros(16, dtype=torch.uint8), DEPTH, num_ids)
    assert isinstance(made, TorchHandover)
    return made


def hand_in(handover: TorchHandover, turn: int, value: int, wants_ids: bool = False) -> None:
    handover.images[turn].fill_(value)
    handover.hand_in(turn, wants_ids)


def fetched(handover: TorchHandover) -> int:
    handover.fetch()
    values = handover._target.unique().tolist()
    assert len(values) == 1
    return int(values[0])


def test_steps_that_are_queued_behind_each_other_fetch_each_its_own() -> None:
    handover = make()
    for turn in range(DEPTH):
        hand_in(handover, turn, 10 + turn)
        handover.note_launch()
    assert [fetched(handover) for _ in range(DEPTH)] == [10, 11, 12, 13]


def test_without_a_new_image_the_target_stays_as_it_is() -> None:
    handover = make()
    hand_in(handover, 0, 5)
    handover.note_launch()
    assert fetched(handover) == 5
    handover._target.fill_(6)  # what is written on the device itself, after a fetch
    assert fetched(handover) == 6


def test_an_image_for_which_nothing_was_launched_is_taken_back() -> None:
    handover = make()
    hand_in(handover, 0, 5)
    handover.note_launch()
    hand_in(handover, 1, 6)
    hand_in(handover, 2, 7)
    handover.note_launch()
    assert [fetched(handover) for _ in range(3)] == [5, 7, 7]


@given(st.lists(st.sampled_from(["launch", "abandon", "run"]), max_size=60))
def test_whatever_the_host_does_ahead_each_launch_gets_what_was_written_for_it(actions: list[str]) -> None:
    handover, turn, value = make(), 0, 0
    queued: list[tuple[int, int]] = []

    def run() -> None:
        assert fetched(handover) == queued.pop(0)[1]

    for action in actions:
        if action == "run":
            if queued:
                run()
            continue
        turn, value = (turn + 1) % DEPTH, value % 250 + 1
        while turn in dict(queued):  # the fences wait
            run()
        hand_in(handover, turn, value)
        if action == "launch":
            handover.note_launch()
            queued.append((turn, value))
    while queued:
        run()


def test_ids_come_back_once_and_only_to_a_step_that_wants_them() -> None:
    handover = make()
    hand_in(handover, 0, 1, wants_ids=True)
    handover.note_launch()
    answer = handover.answer(2)
    handover.fetch()
    handover.post(torch.tensor([7, 8]))
    assert answer.tolist() == [7, 8]
    handover.post(torch.tensor([1, 2]))  # a replay without a new image
    hand_in(handover, 1, 1)
    handover.note_launch()
    handover.fetch()
    handover.post(torch.tensor([3, 4]))
    assert answer.tolist() == [7, 8]


def test_ids_stay_while_the_next_steps_bring_theirs() -> None:
    handover, answers = make(), []
    for step in range(NUM_ANSWERS):
        hand_in(handover, step % DEPTH, 1, wants_ids=True)
        handover.note_launch()
        answers.append(handover.answer(1))
        handover.fetch()
        handover.post(torch.tensor([step]))
    assert [int(answer[0]) for answer in answers] == list(range(NUM_ANSWERS))


def test_more_images_than_a_warp_has_lanes_are_refused() -> None:
    with pytest.raises(AssertionError):
        create_handover(torch.zeros(16, dtype=torch.uint8), MAX_DEPTH + 1, 1)


def test_inputs_that_a_graph_will_fetch_stay_with_the_host_until_then() -> None:
    buffers = InputBuffers(8, 1, torch.device("cpu"))
    buffers.populate(make_batch(3))
    before = buffers.packed.clone()
    buffers.populate(make_batch(2, base=50), graph_fetches=True)
    assert torch.equal(buffers.packed, before)
    buffers.handover.fetch()
    assert buffers.input_ids[:3].tolist() == [50, 51, 0]


def test_inputs_on_the_device_are_not_overwritten_by_the_graph() -> None:
    class OnDevice(torch.Tensor):
        """A host tensor that says it is not one."""

        is_cpu = False  # type: ignore[assignment]

    buffers, batch = InputBuffers(8, 1, torch.device("cpu")), make_batch(3)
    batch.input_ids = batch.input_ids.as_subclass(OnDevice)
    buffers.populate(batch, graph_fetches=True)
    buffers.handover.fetch()
    assert buffers.input_ids[:4].tolist() == [100, 101, 102, 0]


@pytest.mark.parametrize(
    "plan", [StepPlan("graph", (4,)), StepPlan("split", (2, 1)), StepPlan("eager", (4,)), StepPlan("eager")]
)
def test_a_replay_leaves_the_ids_on_the_host_and_what_runs_otherwise_does_not(plan: StepPlan) -> None:
    with runners_attend_with(PastOnlyBackend), tiny_runner(capture_sizes=(1, 2, 4)) as runner:
        output = runner.forward(Requests(runner).first(3), plan)
        assert output.next_token_ids is not None
        if plan.mode == "graph":
            assert output.posted_token_ids is not None
            assert output.posted_token_ids.tolist() == output.next_token_ids.tolist()
        else:
            assert output.posted_token_ids is None


@needs_nvrtc
def test_the_kernels_compile() -> None:
    assert nvrtc.compile_cubin(handover_module._SOURCE, "sm_90", ()).startswith(b"\x7fELF")
