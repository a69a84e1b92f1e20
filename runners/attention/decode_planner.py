"""Plans decode steps for FlashInfer, and knows when the last plan still says the truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from runners.attention.decode_schedule import IntArray, PageBounds, PlanLayout
from runners.attention.host_pages import HostLens, HostPages
from runners.attention.length_range import LengthRange
from runners.errors import PlanLayoutError


class DecodeKernel(Protocol):
    """The decode attention of one group."""

    def plan(self, pages: HostPages) -> PlanLayout:
        """Schedule a batch with these pages into the group's workspace."""

    def serves(self, counts: IntArray) -> bool:
        """Return True if planning these page counts would schedule the same work as the last plan."""

    def bounds(self, counts: IntArray) -> PageBounds | None:
        """Return page counts around these, which the last plan serves, between which it serves any, and none above.

        None if they cannot be told.
        """

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
        """Return True if these tensors lie where the graph reads."""
        same_rows = self.rows.data_ptr() == rows.data_ptr()
        return same_rows and self.seq_lens.data_ptr() == seq_lens.data_ptr()


class DecodePlanner:
    """Plans eager steps, captures and replays into workspaces that all of them share.

    A plan depends on the number of pages of each request and on nothing else that changes. So the last
    plan is reused if it was made for the same captured size, nobody has planned into the workspaces since,
    and the page counts are the same or ones for which every kernel would schedule the same work. `settle`
    works out between which lengths that is so: a step within them is planned by two comparisons.

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
        self._static_lens = HostLens()
        #: The lengths for which `_planned` holds, once they have been worked out.
        self._range: LengthRange | None = None

    def forget_captures(self) -> None:
        """Drop the captured sizes; new ones are about to be captured."""
        self._captured = {}
        self.forget_plan()

    def forget_plan(self) -> None:
        """Somebody else has planned into the workspaces, or is about to."""
        self._planned = self._range = None

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
        if (rows is not step.rows or seq_lens is not step.seq_lens) and not step.reads(rows, seq_lens):
            raise PlanLayoutError(
                f"the graph of size {batch_size} reads other static inputs than those given: pass the tensors "
                "that it was captured with."
            )
        lens = self._static_lens.array(seq_lens_cpu)
        if len(lens) != batch_size:
            lens = lens[:batch_size]
        if self._planned is step and self._describes(lens):
            self.step = step
            self.num_plans_reused += 1
            return
        self._pages.count_array(lens)
        layouts = self._plan(step)
        self.num_plans += 1
        if layouts != step.layouts:
            self.forget_plan()
            raise PlanLayoutError(
                f"the attention plan of size {batch_size} has the layout {layouts}, but its graph was captured with "
                f"{step.layouts}: its kernels would read past what the plan fills."
            )

    def settle(self) -> None:
        """Work out, after a launch, which lengths the last plan serves. Until then a step asks the kernels."""
        if self._range is None and isinstance(self._planned, CapturedSize):
            counts = np.frombuffer(self._planned_counts, dtype=np.int32)
            bounds = [kernel.bounds(counts) or (counts, counts) for kernel in self._planned.kernels]
            least = np.maximum.reduce([least for least, _ in bounds])
            most = np.minimum.reduce([most for _, most in bounds])
            self._range = LengthRange(least, most, self._pages.page_size, self._pages.max_pages)

    def _describes(self, lens: IntArray) -> bool:
        """True if the last plan is the one that these lengths, as many as it was made for, need."""
        if self._range is not None:
            if self._range.holds(lens):
                return True
            if self._range.is_exceeded():
                return False
        assert self._planned is not None
        self._pages.count_array(lens)
        counts = self._pages.counts
        if self._planned_counts == counts.tobytes():
            return True
        if not all(kernel.serves(counts) for kernel in self._planned.kernels):
            return False
        self._pages.check()
        self._planned_counts, self._range = counts.tobytes(), None
        return True

    def _plan(self, step: DecodeStep) -> list[PlanLayout]:
        self.forget_plan()  # a plan that fails halfway leaves the workspaces to nobody
        self._pages.lay_out()
        layouts = [kernel.plan(self._pages) for kernel in step.kernels]
        self._planned_counts = self._pages.counts.tobytes()
        self._planned = self.step = step
        return layouts
