"""The one place that touches FlashInfer, and the only one that knows its private parts.

FlashInfer's public `plan()` copies its arguments to the device again and allocates as it goes. For the
steady state there is `fast_decode_plan`, which does not copy, but leaves the wrapper's buffers to the
caller, and spends five times as long in Python as the planner takes in C++: so a captured size lets it
make its call once, notes the arguments, and makes the same call from then on (`_PlanCall`). And every
wrapper owns 8 MiB of device memory and 8 MiB of pinned memory for schedules, which can only be shared
through private attributes. All this is used on the versions that it was read in, `PRIVATE_PARTS_FROM` up
to `PRIVATE_PARTS_BEFORE`; on a later version, or if an attribute is gone, everything goes through public
calls, slower and with a pinned buffer a wrapper.

Arguments after `page_size` are passed by keyword: their positions are deprecated in 0.7.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch

from runners.attention.base import AttentionGroup
from runners.attention.decode_schedule import (
    TENSOR_CORE_PLAN,
    DecodeSchedule,
    IntArray,
    PageBounds,
    PlanLayout,
    SplitRule,
    read_plan,
)
from runners.attention.flashinfer_workspace import PlanStaging, Workspace
from runners.attention.host_pages import HostPages
from runners.attention.page_indices import PageIndices
from runners.errors import RunnerError

Version = tuple[int, int, int]
PrefillKernel = Literal["fa2", "fa3"]

PRIVATE_PARTS_FROM: Version = (0, 6, 13)
PRIVATE_PARTS_BEFORE: Version = (0, 8, 0)
_PRIVATE_ATTRIBUTES = ("_int_workspace_buffer", "_pin_memory_int_workspace_buffer")


class MissingKernelError(RunnerError):
    """FlashInfer has no compiled kernel for these shapes, and may not compile one."""


def is_installed() -> bool:
    """Return True if FlashInfer can be found. Does not import it: that takes seconds."""
    return importlib.util.find_spec("flashinfer") is not None


def parse_version(text: str) -> Version:
    """Return the first three numbers of a version, `0.7.0.post1` → `(0, 7, 0)`."""
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    if numbers is None:
        raise RunnerError(f"FlashInfer calls its version {text!r}, which is not a version number.")
    return int(numbers[1]), int(numbers[2]), int(numbers[3] or 0)


def may_use_private_parts(version: Version) -> bool:
    """Return True on the versions whose private parts are known.

    Raises RunnerError for a version too old to be driven at all.
    """
    if version < PRIVATE_PARTS_FROM:
        found, least = (".".join(map(str, v)) for v in (version, PRIVATE_PARTS_FROM))
        raise RunnerError(
            f"flashinfer-python {found} is older than {least}: install flashinfer-python>=0.7.1, or use "
            "attention.backend=torch."
        )
    return version < PRIVATE_PARTS_BEFORE


@dataclass(frozen=True)
class KernelShape:
    """What selects a kernel, and the constants of its plans."""

    group: AttentionGroup
    page_size: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype

    def describe(self) -> str:
        group = self.group
        return (
            f"{group.num_qo_heads}/{group.num_kv_heads} heads of {group.head_dim}, query {self.q_dtype}, "
            f"cache {self.kv_dtype}, window {group.sliding_window}, soft cap {group.logits_soft_cap}"
        )

    def options(self) -> dict[str, Any]:
        """Keywords of every `plan`."""
        window = self.group.sliding_window
        return {
            # FlashInfer counts the tokens to the left of the query; a group counts the query too.
            "window_left": -1 if window is None else window - 1,
            "logits_soft_cap": self.group.logits_soft_cap or 0.0,
            "sm_scale": self.group.sm_scale,
            "q_data_type": self.q_dtype,
            "kv_data_type": self.kv_dtype,
        }


class FlashInfer:
    """The installed FlashInfer. Imports it: raises RunnerError if it is missing or too old."""

    def __init__(self) -> None:
        if not is_installed():
            raise RunnerError(
                "attention.backend=flashinfer: flashinfer-python is not installed. Install cudagraph-harness[gpu], "
                "or use attention.backend=torch."
            )
        self.package: Any = importlib.import_module("flashinfer")
        self.decode: Any = importlib.import_module("flashinfer.decode")
        self.version = parse_version(self.package.__version__)
        self.uses_private_parts = may_use_private_parts(self.version) and hasattr(
            self.decode, "fast_decode_plan"
        )

    def adopt(self, wrapper: Any, workspace: Workspace) -> PlanStaging:
        """Let a new wrapper use the shared workspace; return the staging of its plans."""
        if self.uses_private_parts and all(hasattr(wrapper, name) for name in _PRIVATE_ATTRIBUTES):
            wrapper._int_workspace_buffer = workspace.int_buffer
            wrapper._pin_memory_int_workspace_buffer = None
            return workspace.staging
        # Public: the device buffer is shared, but the wrapper pins a buffer of its own for it.
        wrapper.reset_workspace_buffer(workspace.float_buffer, workspace.int_buffer)
        return PlanStaging(0, 1, workspace.int_buffer.device)


class Wrapper:
    """A FlashInfer wrapper on a shared workspace."""

    def __init__(self, library: FlashInfer, wrapper: Any, shape: KernelShape, workspace: Workspace) -> None:
        self.shape = shape
        self._wrapper = wrapper
        self._staging = library.adopt(wrapper, workspace)
        self._shares_staging = self._staging is workspace.staging

    def _stage(self, plan: Callable[[], None]) -> None:
        """Run `plan` with a pinned buffer that no queued copy reads."""
        pinned = self._staging.acquire()
        if self._shares_staging:
            self._wrapper._pin_memory_int_workspace_buffer = pinned
        plan()
        if not self._shares_staging:
            self._staging.settle()  # its only buffer: the next plan waits for this copy, and for no more

    def stage_first(self, plan: Callable[[], None]) -> None:
        """As `_stage`, for a plan that may load or compile the kernel."""
        try:
            self._stage(plan)
        except RuntimeError as error:
            # By name: its module moved between versions.
            if type(error).__name__ != "MissingJITCacheError":
                raise
            raise MissingKernelError(
                f"FlashInfer has no compiled kernel for {self.shape.describe()}, and FLASHINFER_DISABLE_JIT forbids "
                "compiling one: build it ahead of time (docs/offline.md), unset the variable where nvcc is "
                "installed, or use attention.backend=torch."
            ) from error


class _PlanCall:
    """The call of the C++ planner that `fast_decode_plan` makes for a captured size, to be made again.

    Of its arguments only the pinned staging buffer changes from plan to plan. The others are numbers
    that are fixed with the size, and tensors that keep their place: `HostPages` writes new contents.
    """

    def __init__(
        self, wrapper: Any, plan: Callable[[], None], pinned: torch.Tensor, pages: HostPages
    ) -> None:
        module = wrapper._cached_module
        self._function: Callable[..., Any] = module.plan
        self._args: list[Any] = []
        wrapper._cached_module = SimpleNamespace(plan=self._note)
        try:
            plan()
        finally:
            wrapper._cached_module = module
        places = [i for i, argument in enumerate(self._args) if argument is pinned]
        if len(places) != 1:
            raise RunnerError("FlashInfer's planner did not take the staging buffer that it was given.")
        self._pinned_at = places[0]
        self._args = [pages.seq_lens if _is_like(a, pages.seq_lens) else a for a in self._args]

    def _note(self, *args: Any) -> Any:
        self._args = list(args)
        return self._function(*args)

    def __call__(self, pinned: torch.Tensor) -> Any:
        """Plan what `HostPages` holds now; return FlashInfer's plan."""
        self._args[self._pinned_at] = pinned
        return self._function(*self._args)


def _is_like(argument: Any, lens: torch.Tensor) -> bool:
    """True for the lengths that `fast_decode_plan` works out on the host for the tensor-core planner."""
    return (
        isinstance(argument, torch.Tensor)
        and argument.is_cpu
        and argument.dtype == lens.dtype
        and argument.shape == lens.shape
    )


class DecodeWrapper(Wrapper):
    """Plans and runs the decode attention of one group.

    Args:
        library: the installed FlashInfer.
        shape: the kernel and its constants.
        workspace: shared by all wrappers of the group.
        pages: device buffers that the kernels read; `write_page_indices` fills them in each forward pass.
        batch_size: the fixed batch of a captured graph, or None for eager steps of any size.
        use_tensor_cores: the FA2 prefill kernel in place of the decode kernel.
    """

    def __init__(
        self,
        library: FlashInfer,
        shape: KernelShape,
        workspace: Workspace,
        pages: PageIndices,
        *,
        batch_size: int | None,
        use_tensor_cores: bool,
    ) -> None:
        self._pages = pages
        self._batch_size = batch_size
        self._use_tensor_cores = use_tensor_cores
        buffers: dict[str, Any] = {}
        if batch_size is not None:
            buffers = {
                "paged_kv_indptr_buffer": pages.indptr[: batch_size + 1],
                "paged_kv_indices_buffer": pages.indices,
                "paged_kv_last_page_len_buffer": pages.last_page_len[:batch_size],
            }
        # NOTE: never backend="auto": it is resolved again at each plan, at a cost, and may pick another
        # kernel (XQA, cuDNN) whose metadata the fast plan leaves stale.
        wrapper = library.package.BatchDecodeWithPagedKVCacheWrapper(
            workspace.float_buffer,
            "NHD",
            use_cuda_graph=batch_size is not None,
            use_tensor_cores=use_tensor_cores,
            backend="fa2",
            **buffers,
        )
        super().__init__(library, wrapper, shape, workspace)
        group = shape.group
        self._constants = {
            "num_qo_heads": group.num_qo_heads,
            "num_kv_heads": group.num_kv_heads,
            "head_dim": group.head_dim,
            "page_size": shape.page_size,
            **shape.options(),
        }
        self._is_planned = False
        self._schedule: DecodeSchedule | None = None
        self._planned_in: torch.Tensor | None = None
        self._planned_counts = np.zeros(0, dtype=np.int32)
        self._plan_call: _PlanCall | None = None
        self._fast_plan: Callable[..., None] | None = None
        if library.uses_private_parts:
            self._fast_plan = functools.partial(
                library.decode.fast_decode_plan, wrapper, indices=pages.indices, **self._constants
            )

    def plan(self, pages: HostPages) -> PlanLayout:
        """Schedule a batch with these pages and queue the copy of the schedule; return its layout.

        The first plan is a public one: it loads the kernel.
        """
        self._schedule = None
        if self._plan_call is not None:
            self._planned_in = self._staging.acquire()
            self._wrapper._plan_info = self._plan_call(self._planned_in)
        elif self._is_planned and self._fast_plan is not None:
            self._stage(functools.partial(self._plan_fast, self._fast_plan, pages))
            self._planned_in = self._shared_pinned()
        else:
            self.stage_first(functools.partial(self._plan_public, pages))
            self._is_planned = True
            self._planned_in = self._shared_pinned()
        self._planned_counts = pages.counts.copy()
        return self._layout()

    def serves(self, counts: IntArray) -> bool:
        """Return True if planning these page counts would schedule the same work as the last plan."""
        if self._schedule is None and self._planned_in is not None:
            arrays = read_plan(self._layout(), self._planned_in, len(counts))
            if arrays is not None:
                self._schedule = DecodeSchedule.make(self._split_rule(), arrays, self._planned_counts)
            self._planned_in = None  # once a plan; a schedule that cannot be made is not tried again
        return self._schedule is not None and self._schedule.serves(counts)

    def bounds(self, counts: IntArray) -> PageBounds | None:
        """Return page counts around these between which the last plan serves any; None if it serves not even these."""
        return self._schedule.bounds(counts) if self.serves(counts) and self._schedule is not None else None

    def _shared_pinned(self) -> torch.Tensor | None:
        """What the plan just made was written to, if we know that; eager plans are not kept."""
        if not self._shares_staging or self._batch_size is None:
            return None
        pinned: torch.Tensor = self._wrapper._pin_memory_int_workspace_buffer
        return pinned

    def _split_rule(self) -> SplitRule:
        layout, window = self._layout(), self.shape.group.sliding_window
        max_pages = None
        if window is not None and self._use_tensor_cores:
            tokens = window - 1 + layout[TENSOR_CORE_PLAN.query_tile]
            max_pages = -(-tokens // self.shape.page_size)
        return SplitRule(self.shape.page_size, layout[0], max_pages)

    def _layout(self) -> PlanLayout:
        return tuple(getattr(self._wrapper, "_plan_info", None) or ())

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """Return the attention of `q` `[batch_size, num_qo_heads, head_dim]` over the planned pages."""
        out: torch.Tensor = self._wrapper.run(q, (k_cache, v_cache))
        return out

    def _plan_fast(self, fast_plan: Callable[..., None], pages: HostPages) -> None:
        n = pages.batch_size
        # last_page_len must be on the host: the tensor-core path reads it there, from the device at the
        # price of a sync. What the kernels read are the static buffers.
        plan = functools.partial(
            fast_plan,
            indptr=self._pages.indptr[: n + 1],
            last_page_len=pages.last_page_len,
            global_override_indptr_cpu=pages.indptr,
        )
        if self._batch_size is None:
            plan()
            self._wrapper._paged_kv_last_page_len_buf = self._pages.last_page_len[:n]
        elif self._shares_staging and hasattr(self._wrapper, "_cached_module"):
            pinned = self._wrapper._pin_memory_int_workspace_buffer
            self._plan_call = _PlanCall(self._wrapper, plan, pinned, pages)
        else:
            plan()

    def _plan_public(self, pages: HostPages) -> None:
        # A graph's index buffer is static, and an empty list keeps plan() from copying it onto itself.
        indices = self._pages.indices if self._batch_size is None else self._pages.indices[:0]
        self._wrapper.plan(pages.indptr, indices, pages.last_page_len, **self._constants)
