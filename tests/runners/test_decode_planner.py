"""When a decode plan is made, when the last one is reused, and when its layout is refused."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runners.attention.decode_planner import DecodeKernel, DecodePlanner
from runners.attention.decode_schedule import IntArray, PageBounds, PlanLayout
from runners.attention.host_pages import HostPages
from runners.errors import PlanLayoutError

SIZES = (1, 2, 4)
NUM_GROUPS = 2


@dataclass
class Workspace:
    """What a group's kernels plan into: the last plan wins, as in FlashInfer."""

    owner: object = None
    page_counts: list[int] = field(default_factory=list)


class Kernel:
    """Plans like FlashInfer: the schedule goes to the shared workspace, the layout is returned."""

    def __init__(self, workspace: Workspace, batch_size: int | None) -> None:
        self.workspace = workspace
        self.batch_size = batch_size
        self.extra_layout: PlanLayout = ()
        self.fails = False
        self.chunk = 1
        self.knows_bounds = True
        self.times_asked = 0

    def plan(self, pages: HostPages) -> PlanLayout:
        if self.fails:
            raise RuntimeError("no plan")
        self.workspace.owner, self.workspace.page_counts = self, pages.counts.tolist()
        return (self.batch_size or pages.batch_size, 1, *self.extra_layout)

    def serves(self, counts: IntArray) -> bool:
        """Schedules whole chunks of `chunk` pages, as FlashInfer does."""
        self.times_asked += 1
        chunks = [-(-count // self.chunk) for count in self.workspace.page_counts]
        return chunks == [-(-count // self.chunk) for count in counts.tolist()]

    def bounds(self, counts: IntArray) -> PageBounds | None:
        chunks = -(-counts // self.chunk)
        bounds = ((chunks - 1) * self.chunk + 1, chunks * self.chunk)
        return bounds if self.knows_bounds else None

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        return q


class Bench:
    """A planner of two groups with captured sizes, over static inputs."""

    def __init__(self) -> None:
        self.workspaces = [Workspace() for _ in range(NUM_GROUPS)]
        self.pages = HostPages(max_batch_size=8, page_size=16, max_pages=16)
        self.planner = DecodePlanner(self.make_kernels, self.pages)
        self.rows = torch.zeros(8, dtype=torch.int32)
        self.seq_lens = torch.ones(8, dtype=torch.int32)
        for size in reversed(SIZES):
            self.planner.plan_capture(size, self.rows[:size], self.seq_lens[:size], fill_value=1)

    def make_kernels(self, batch_size: int | None) -> list[DecodeKernel]:
        return [Kernel(workspace, batch_size) for workspace in self.workspaces]

    def replay(self, *lens: int) -> None:
        n = len(lens)
        self.planner.plan_replay(n, self.rows[:n], self.seq_lens[:n], torch.tensor(lens, dtype=torch.int32))

    def kernels(self) -> list[Kernel]:
        assert self.planner.step is not None
        return self.planner.step.kernels  # type: ignore[return-value]

    def assert_workspaces_describe(self, *lens: int) -> None:
        for kernel, workspace in zip(self.kernels(), self.workspaces, strict=True):
            assert workspace.owner is kernel
            assert workspace.page_counts == [-(-length // 16) for length in lens]


def test_the_plan_is_kept_while_no_request_enters_a_new_page() -> None:
    bench = Bench()
    for length in range(17, 33):
        bench.replay(length, 5)
    assert (bench.planner.num_plans, bench.planner.num_plans_reused) == (1, 15)
    bench.replay(33, 5)
    assert bench.planner.num_plans == 2
    bench.assert_workspaces_describe(33, 5)


def test_the_plan_is_kept_across_page_edges_while_every_kernel_would_plan_the_same() -> None:
    bench = Bench()
    bench.replay(17, 5)
    for kernel in bench.kernels():
        kernel.chunk = 4
    for length in range(18, 65):
        bench.replay(length, 5)
    assert bench.planner.num_plans == 1
    bench.replay(65, 5)
    assert bench.planner.num_plans == 2
    bench.assert_workspaces_describe(65, 5)


def test_one_kernel_that_would_plan_otherwise_is_enough_for_a_new_plan() -> None:
    bench = Bench()
    bench.replay(16, 5)
    bench.kernels()[0].chunk = 4
    bench.replay(17, 5)
    assert bench.planner.num_plans == 2


def test_a_kept_plan_still_refuses_a_request_longer_than_the_page_table() -> None:
    bench = Bench()
    bench.replay(250, 5)
    for kernel in bench.kernels():
        kernel.chunk = 100
    with pytest.raises(PlanLayoutError, match="257 tokens"):
        bench.replay(257, 5)


def test_a_settled_plan_is_kept_between_its_bounds_without_asking_a_kernel() -> None:
    bench = Bench()
    bench.replay(20, 5)
    for kernel, chunk in zip(bench.kernels(), (4, 2), strict=True):
        kernel.chunk = chunk
    bench.planner.settle()
    for length in (*range(21, 33), 5, 1):
        bench.replay(length, 32)
    assert bench.planner.num_plans == 1 and sum(kernel.times_asked for kernel in bench.kernels()) == 0
    bench.replay(33, 32)  # another chunk for the second kernel alone
    assert bench.planner.num_plans == 2
    bench.assert_workspaces_describe(33, 32)


def test_a_settled_plan_whose_kernel_knows_no_bounds_is_kept_for_the_same_pages() -> None:
    bench = Bench()
    bench.replay(20, 5)
    for kernel in bench.kernels():
        kernel.chunk, kernel.knows_bounds = 4, kernel is bench.kernels()[0]
    bench.planner.settle()
    for length in (17, 32):
        bench.replay(length, 16)
    assert all(kernel.times_asked == 0 for kernel in bench.kernels())
    bench.replay(16, 16)  # fewer pages: the kernels may still serve them
    assert bench.kernels()[0].times_asked == 1 and bench.planner.num_plans == 1
    bench.planner.settle()
    bench.replay(17, 16)  # more pages: the one without bounds does not
    assert bench.kernels()[0].times_asked == 1 and bench.planner.num_plans == 2


def test_a_settled_plan_refuses_a_request_longer_than_the_page_table() -> None:
    bench = Bench()
    bench.replay(250, 5)
    for kernel in bench.kernels():
        kernel.chunk = 100
    bench.planner.settle()
    bench.replay(256, 5)
    with pytest.raises(PlanLayoutError, match="257 tokens"):
        bench.replay(257, 5)


def test_another_size_takes_the_workspace_and_the_first_plans_again() -> None:
    bench = Bench()
    bench.replay(20, 5)
    bench.replay(20)
    bench.replay(20, 5)
    assert bench.planner.num_plans == 3
    bench.assert_workspaces_describe(20, 5)


def test_the_capture_does_not_pass_for_a_replay_of_other_counts() -> None:
    bench = Bench()
    bench.replay(1)  # the counts that size 1 was captured with, and the last capture was size 1
    assert bench.planner.num_plans_reused == 1
    bench.replay(17)
    bench.assert_workspaces_describe(17)


def test_a_prefill_in_between_forces_a_plan() -> None:
    bench = Bench()
    bench.replay(20)
    bench.planner.forget_plan()
    bench.replay(20)
    assert bench.planner.num_plans == 2


def test_an_eager_step_in_between_forces_a_plan() -> None:
    bench = Bench()
    bench.replay(20)
    bench.planner.plan_eager(bench.rows[:1], bench.seq_lens[:1], torch.tensor([20], dtype=torch.int32))
    bench.replay(20)
    bench.assert_workspaces_describe(20)


def test_a_layout_that_differs_from_the_captured_one_is_refused() -> None:
    bench = Bench()
    bench.replay(20, 5)
    bench.kernels()[1].extra_layout = (7,)
    with pytest.raises(PlanLayoutError, match=r"size 2 has the layout .*\(2, 1, 7\).* captured with"):
        bench.replay(40, 5)


def test_a_refused_layout_is_not_taken_for_a_plan_afterwards() -> None:
    bench = Bench()
    bench.replay(20, 5)
    kernel = bench.kernels()[1]
    kernel.extra_layout = (7,)
    for _ in range(2):
        with pytest.raises(PlanLayoutError):
            bench.replay(40, 5)


def test_a_plan_that_fails_halfway_is_not_reused() -> None:
    bench = Bench()
    bench.replay(20, 5)
    second = bench.kernels()[1]
    second.fails = True
    with pytest.raises(RuntimeError, match="no plan"):
        bench.replay(40, 5)
    second.fails = False
    bench.replay(20, 5)
    bench.assert_workspaces_describe(20, 5)


def test_other_static_inputs_than_the_captured_ones_are_refused() -> None:
    bench = Bench()
    elsewhere = torch.ones(2, dtype=torch.int32)
    with pytest.raises(PlanLayoutError, match="other static inputs"):
        bench.planner.plan_replay(2, bench.rows[:2], elsewhere, torch.tensor([20, 5], dtype=torch.int32))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["replay", "settled replay", "eager", "prefill"]),
            st.sampled_from(SIZES).flatmap(lambda n: st.lists(st.integers(1, 64), min_size=n, max_size=n)),
        ),
        max_size=20,
    )
)
def test_whatever_came_before_a_replay_finds_its_own_plan(steps: list[tuple[str, list[int]]]) -> None:
    bench = Bench()
    for kind, lens in steps:
        n = len(lens)
        if "replay" in kind:
            bench.replay(*lens)
            if kind == "settled replay":
                bench.planner.settle()
        elif kind == "eager":
            cpu = torch.tensor(lens, dtype=torch.int32)
            bench.planner.plan_eager(bench.rows[:n], bench.seq_lens[:n], cpu)
        else:
            bench.planner.forget_plan()
            for workspace in bench.workspaces:
                workspace.owner = "prefill"
            continue
        bench.assert_workspaces_describe(*lens)
