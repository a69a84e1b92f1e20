"""Each step gets the inputs that the host wrote for it, however far the host is ahead, and its ids come back once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runners import handover as handover_module
from runners.attention.torch_backend import TorchAttentionBackend
from runners.batches import fed_batch
from runners.errors import PlanLayoutError
from runners.handover import MAX_DEPTH, NUM_ANSWERS, Handover, TorchHandover, create_handover
from runners.input_buffers import InputBuffers
from runners.models.fused import nvrtc
from runners.padding import StepPlan
from runners.token_reader import TokenReader
from tests.runners.kernel_source import needs_nvrtc
from tests.runners.past_only import PastOnlyBackend, runners_attend_with
from tests.runners.test_input_buffers import OnDevice, make_batch
from tests.runners.tiny_runner import Requests, tiny_runner

DEPTH = 4


def make(num_ids: int = 3) -> TorchHandover:
    made = create_handover(torch.zeros(16, dtype=torch.uint8), DEPTH, num_ids)
    assert isinstance(made, TorchHandover)
    return made


def hand_in(handover: TorchHandover, turn: int, value: int, wants_ids: bool = False) -> None:
    handover.images[turn].fill_(value)
    handover.hand_in(turn, wants_ids)


def fetched(handover: Handover) -> int:
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


def test_an_image_that_is_there_already_is_left_alone_and_its_ids_are_posted() -> None:
    handover = make()
    handover.images[0].fill_(5)
    handover.upload(0)
    handover._target.fill_(6)  # what was copied there on the device
    handover.hand_in(0, wants_ids=True, is_there=True)
    handover.note_launch()
    hand_in(handover, 1, 7)
    handover.note_launch()
    assert fetched(handover) == 6
    handover.post(torch.tensor([3]))
    assert fetched(handover) == 7 and handover.answer(1).tolist() == [3]


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
    buffers.populate(make_batch(2, base=50), graph_follows=True)
    assert torch.equal(buffers.packed, before)
    buffers.handover.fetch()
    assert buffers.input_ids[:3].tolist() == [50, 51, 0]


def test_inputs_on_the_device_are_not_overwritten_by_the_graph() -> None:
    buffers, batch = InputBuffers(8, 1, torch.device("cpu")), make_batch(3)
    batch.input_ids = batch.input_ids.as_subclass(OnDevice)
    buffers.populate(batch, graph_follows=True)
    buffers.handover.fetch()
    assert buffers.input_ids[:4].tolist() == [100, 101, 102, 0]


class Stream:
    """What the host queues runs later: uploads, copies on the device, and graphs that begin with a fetch."""

    def __init__(self, buffers: InputBuffers, monkeypatch: pytest.MonkeyPatch) -> None:
        self._buffers, self._queue = buffers, []  # type: ignore[var-annotated]
        #: Ids and positions that each graph has read.
        self.seen: list[tuple[list[int], list[int]]] = []
        upload, copy = buffers.handover.upload, buffers._copy_on_device
        monkeypatch.setattr(buffers.handover, "upload", lambda turn: self._queue.append(lambda: upload(turn)))
        monkeypatch.setattr(buffers, "_copy_on_device", lambda *what: self._queue.append(lambda: copy(*what)))

    def replay(self, size: int) -> None:
        def graph() -> None:
            self._buffers.handover.fetch()
            ids, positions = self._buffers.input_ids[:size], self._buffers.positions[:size]
            self.seen.append((ids.tolist(), positions.tolist()))

        self._queue.append(graph)

    def run(self) -> None:
        for work in self._queue:
            work()


@pytest.mark.parametrize("needs", [{}, {"at_once": True}, {"on_device": True}])
def test_each_of_two_steps_in_flight_reads_its_own_inputs(
    needs: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = InputBuffers(8, 1, torch.device("cpu"))
    stream = Stream(buffers, monkeypatch)
    for base in (100, 200, 300):
        batch = make_batch(2, base)
        if needs.get("on_device"):
            batch.input_ids = batch.input_ids.as_subclass(OnDevice)
        buffers.populate(batch, graph_follows=True, at_once=needs.get("at_once", False))
        stream.replay(3)
        buffers.handover.note_launch()
    stream.run()
    assert stream.seen == [([base, base + 1, 0], [base, base + 1, 0]) for base in (100, 200, 300)]


@pytest.mark.parametrize("backend", [PastOnlyBackend, TorchAttentionBackend])
@pytest.mark.parametrize("is_fed", [False, True])
def test_each_part_of_a_split_reads_its_own_inputs(
    backend: type[TorchAttentionBackend], is_fed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with runners_attend_with(backend), tiny_runner(capture_sizes=(1, 2)) as runner:
        graphs, batch = runner.graph_runner, Requests(runner).first(4)
        assert graphs is not None and graphs._steps is not None
        stream = Stream(graphs.buffers, monkeypatch)
        monkeypatch.setattr(graphs.graphs[2], "replay", lambda: stream.replay(2))
        ids = batch.input_ids.tolist()
        if is_fed:
            ids = [11, 12, 13, 14]
            runner.token_ids[:4] = torch.tensor(ids)
            batch = fed_batch(batch, np.arange(4, dtype=np.int32))
            known = graphs._steps._with_known_ids(batch)
            known.input_ids = known.input_ids.as_subclass(OnDevice)
            monkeypatch.setattr(graphs._steps, "_with_known_ids", lambda batch: known)
        runner.forward(batch, StepPlan("split", (2, 2)))
        stream.run()
        positions = batch.positions.tolist()
        assert stream.seen == [(ids[:2], positions[:2]), (ids[2:], positions[2:])]


def test_a_launch_that_fails_afterwards_keeps_its_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def start(self) -> None: ...

        def stop(self) -> None:
            raise RuntimeError("no event")

    with runners_attend_with(PastOnlyBackend), tiny_runner(capture_sizes=(2,)) as runner:
        graphs, requests = runner.graph_runner, Requests(runner)
        assert graphs is not None
        stream = Stream(graphs.buffers, monkeypatch)
        monkeypatch.setattr(graphs.graphs[2], "replay", lambda: stream.replay(2))
        batch = requests.first(2)
        runner.stopwatch = Broken()  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match="no event"):
            runner.forward(batch)
        runner.stopwatch = None
        runner.forward(fed_batch(batch, np.array([-1, -1], dtype=np.int32)))
        stream.run()
        assert stream.seen[0] == (batch.input_ids.tolist(), batch.positions.tolist())


class PlanlessBackend(PastOnlyBackend):
    """Takes its attention plan for no more than a look for requests that are too long."""

    replay_plans_from = "nothing"
    num_looks = 0

    def init_forward_metadata_replay_cuda_graph(self, *arguments: Any) -> None:
        self.num_looks += 1
        super().init_forward_metadata_replay_cuda_graph(*arguments)


def test_lengths_are_looked_at_unless_they_were_checked_as_the_batch_was_made() -> None:
    with runners_attend_with(PlanlessBackend), tiny_runner(capture_sizes=(2,)) as runner:
        backend, batch = runner.attn_backend, Requests(runner).first(2)
        assert isinstance(backend, PlanlessBackend)
        runner.forward(batch)
        assert backend.num_looks == 0
        batch.seq_lens_cpu[1] = 10_000
        with pytest.raises(PlanLayoutError, match="a request has 10000 tokens"):
            runner.forward(batch, StepPlan("graph", (2,)))


def test_an_interrupt_right_after_a_launch_leaves_it_its_inputs() -> None:
    """The host knows nothing of the launch: it waits for what is queued before it drops the ticket."""
    handover, seen = make(), []  # type: tuple[TorchHandover, list[int]]
    hand_in(handover, 0, 5)
    handover._wait = lambda: seen.append(fetched(handover))  # type: ignore[method-assign]
    hand_in(handover, 1, 6)
    handover.note_launch()
    assert seen == [5] and fetched(handover) == 6


def test_steps_that_are_given_up_use_up_no_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with runners_attend_with(PastOnlyBackend), tiny_runner(capture_sizes=(2,)) as runner:
        requests, reader = Requests(runner), TokenReader(torch.device("cpu"), 4, num_buffers=3)
        output = runner.forward(requests.first(2))
        assert output.next_token_ids is not None
        tokens, pending = output.next_token_ids.tolist(), reader.enqueue(output)

        def refuse(*arguments: object) -> None:
            raise PlanLayoutError("another layout")

        with monkeypatch.context() as patch:
            patch.setattr(runner.attn_backend, "init_forward_metadata_replay_cuda_graph", refuse)
            for _ in range(2 * NUM_ANSWERS - 1):
                with pytest.raises(PlanLayoutError):
                    runner.forward(requests.first(2), StepPlan("graph", (2,)))
        runner.forward(requests.first(1))
        assert pending.read().tolist() == tokens


def test_a_step_that_was_given_up_is_not_fetched_by_what_comes_after_an_eager_one() -> None:
    buffers = InputBuffers(8, 1, torch.device("cpu"))
    buffers.populate(make_batch(2, base=50), graph_follows=True)
    buffers.populate(make_batch(2, base=70))  # eager
    buffers.handover.fetch()  # the warm-up of another capture
    assert buffers.input_ids[:2].tolist() == [70, 71]


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
