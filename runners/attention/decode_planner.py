"""Plans decode steps for FlashInfer, and knows when the last plan still says the truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from runners.attention.decode_schedule import IntArray, PlanLayout
from runners.attention.host_pages import HostPages
from runners.errors import PlanLayoutError


class DecodeKernel(Protocol):
    """The decode attention of one group."""

    def plan(self, pages: HostPages) -> PlanLayout:
        """Schedule a batch with these pages into the group's workspace."""

    def serves(self, counts: IntArray) -> bool:
        """Return True if planning these page counts would schedule the same work as the last plan."""

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """Compute the planned batch."""


@dataclass
class DecodeStep:
    """Who computes a decode step, and the device inputs that its page lists are made from."""

    kernels: list[DecodeKernel]
    rows: torch.Tensor
    seq_lens: torch.Tensor


@dataclass
class CapturedSize(DecodeStep):
    """A decode step that a graph was captured of. Its plans must keep these layouts."""

    layouts: list[PlanLayout]

    def reads(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> bool:
        """Return True if these tensors are the ones that the graph reads."""
        if rows is self.rows and seq_lens is self.seq_lens:
            return True
        same_rows = self.rows.data_ptr() == rows.data_ptr()
        return same_rows and self.seq_lens.data_ptr() == seq_lens.data_ptr()


class DecodePlanner:
    """Plans eager steps, captures and replays into workspaces that all of them share.

    A plan depends on the number of pages of each request and on nothing else that changes. So the last
    plan is reused if it was made for the same captured size, nobody has planned into the workspaces since,
    and the page counts are the same or ones for which every kernel would schedule the same work.

    Args:
        make_kernels: returns a kernel per attention group, for a fixed batch size or, with None, for
            eager steps of any size.
        pages: the host's page counts.

    Attributes:
        step: the step planned last.
        num_plans, num_plans_reused: replays that were planned, and that needed no plan.
    """

    def __init__(self, make_kernels: Callable[[int | None], list[DecodeKernel]], pages: HostPages) -> None:
        self.step: DecodeStep | None = None
        self.num_plans = self.num_plans_reused = 0
        self._make_kernels = make_kernels
        self._pages = pages
        self._eager_kernels = make_kernels(None)
        self._captured: dict[int, CapturedSize] = {}
        self._planned: DecodeStep | None = None
        self._planned_counts = b""

    def forget_captures(self) -> None:
        """Drop the captured sizes; new ones are about to be captured."""
        self._captured = {}
        self.forget_plan()

    def forget_plan(self) -> None:
        """Somebody else has planned into the workspaces, or is about to."""
        self._planned = None

    def plan_eager(self, rows: torch.Tensor, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor) -> None:
        """Plan an eager step."""
        self._pages.count(seq_lens_cpu)
        self._plan(DecodeStep(self._eager_kernels, rows, seq_lens))

    def plan_capture(
        self, batch_size: int, rows: torch.Tensor, seq_lens: torch.Tensor, fill_value: int
    ) -> None:
        """Plan the capture of a size on padding rows, and remember the layouts."""
        self._pages.count(torch.full((batch_size,), fill_value, dtype=torch.int32))
        step = CapturedSize(self._make_kernels(batch_size), rows, seq_lens, [])
        step.layouts = self._plan(step)
        self._captured[batch_size] = step

    def plan_replay(
        self, batch_size: int, rows: torch.Tensor, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor
    ) -> None:
        """Plan a replay of a captured size, unless the last plan describes it.

        Raises PlanLayoutError if the plan's layout or the inputs differ from what was captured.
        """
        step = self._captured[batch_size]
        if not step.reads(rows, seq_lens):
            raise PlanLayoutError(
                f"the graph of size {batch_size} reads other static inputs than those given: pass the tensors "
                "that it was captured with."
            )
        self._pages.count_static(seq_lens_cpu, batch_size)
        if self._describes(step):
            self.step = step
            self.num_plans_reused += 1
            return
        layouts = self._plan(step)
        self.num_plans += 1
        if layouts != step.layouts:
            self.forget_plan()
            raise PlanLayoutError(
                f"the attention plan of size {batch_size} has the layout {layouts}, but its graph was captured with "
                f"{step.layouts}: its kernels would read past what the plan fills."
            )

    def _describes(self, step: CapturedSize) -> bool:
        """True if the workspaces hold the plan of `step` that the pages' counts need."""
        if self._planned is not step:
            return False
        counts = self._pages.counts.tobytes()
        if self._planned_counts == counts:
            return True
        self._pages.check()
        if not all(kernel.serves(self._pages.counts) for kernel in step.kernels):
            return False
        self._planned_counts = counts
        return True

    def _plan(self, step: DecodeStep) -> list[PlanLayout]:
        self.forget_plan()  # a plan that fails halfway leaves the workspaces to nobody
        self._pages.lay_out()
        layouts = [kernel.plan(self._pages) for kernel in step.kernels]
        self._planned_counts = self._pages.counts.tobytes()
        self._planned = self.step = step
        return layouts
