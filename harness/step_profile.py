"""Where the device time of a step goes: the kernels of each graph, and the gaps between them.

By torch's profiler, after everything that is timed: it slows the host, so its figures show the shape of a
step and not its length. Without CUDA the operators of the emulated graph are shown instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

from harness.host_clock import DeviceWork
from harness.probe import ProbeRequests
from harness.size_sweep import fitting_requests
from runners.padding import Mode, StepPlan

if TYPE_CHECKING:
    from runners.forward_batch import ForwardBatch
    from runners.model_runner import ModelRunner

_NUM_WARMUP, _NUM_STEPS = 3, 5
_MAX_SIZES = 8
#: The mark around a step; the profiler repeats it among the device's events.
_STEP = "cudagraph_harness::decode_step"


class Event(Protocol):
    """What is read of `torch.autograd.profiler_util.FunctionEvent`; times in µs."""

    @property
    def name(self) -> str: ...
    @property
    def id(self) -> int:
        """Of a kernel, the correlation id of the call that launched it; a graph's kernels share one."""
        ...

    @property
    def device_type(self) -> DeviceType: ...
    @property
    def time_range(self) -> Any: ...
    @property
    def self_cpu_time_total(self) -> float: ...


@dataclass(frozen=True)
class Kernel:
    """One thing that the device did: a kernel, a copy or a fill."""

    name: str
    start_us: float
    end_us: float
    in_graph: bool


def profile_steps(
    runner: ModelRunner, context_len: int, seed: int, on_rows: Callable[[list[dict[str, Any]]], None]
) -> dict[str, Any]:
    """Profile a few steps of the captured sizes, and eager ones of the largest; `on_rows` gets the rows of
    `profile.csv` size by size. Returns the `profile` part of `result.json`."""
    config = runner.config
    fitting = fitting_requests(config.num_kv_pages, config.page_size, context_len)
    graphs = runner.graph_runner
    sizes = graphs.capture_bs if graphs is not None else [config.max_batch_size]
    sizes = _thinned([size for size in sizes if size <= fitting]) or [fitting]
    shapes = []
    with ProbeRequests(runner, [context_len] * max(sizes), seed) as probe:
        for size in sizes:
            for plan in _plans(runner, size, is_largest=size == max(sizes)):
                backend = "none" if plan.mode == "eager" else runner.graph_backend
                events = profiled_steps(runner, probe.decode_batch(size), plan)
                steps = kernels_by_step(events)
                point = {"batch_size": size, "mode": plan.mode, "graph_backend": backend}
                rows = kernel_rows(steps) if any(steps) else operator_rows(events)
                on_rows([point | row for row in rows])
                shapes.append({**point, **shape_of(steps)})
    return {"context_len": context_len, "num_steps": _NUM_STEPS, "graphs": shapes}


def _thinned(sizes: Sequence[int]) -> list[int]:
    """At most `_MAX_SIZES` sizes, evenly, the first and the last always."""
    if len(sizes) <= _MAX_SIZES:
        return list(sizes)
    return [sizes[round(i * (len(sizes) - 1) / (_MAX_SIZES - 1))] for i in range(_MAX_SIZES)]


def _plans(runner: ModelRunner, size: int, is_largest: bool) -> Iterable[StepPlan]:
    if runner.graph_runner is not None:
        mode: Mode = "compiled" if runner.graph_backend == "inductor" else "graph"
        yield StepPlan(mode, (size,), "forced")
    if is_largest:
        yield StepPlan("eager", (), "forced")


def profiled_steps(runner: ModelRunner, batch: ForwardBatch, plan: StepPlan) -> list[Event]:
    """Return what torch's profiler saw of a few steps of `batch` by `plan`, each marked."""
    work = DeviceWork(runner.device)
    for _ in range(_NUM_WARMUP):
        runner.forward(batch, plan=plan)
    work.read()
    on_cuda = runner.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities) as profiler:
        for _ in range(_NUM_STEPS):
            with record_function(_STEP):
                runner.forward(batch, plan=plan)
                work.read()
    return list(profiler.events() or ())


def kernels_by_step(events: Sequence[Event]) -> list[list[Kernel]]:
    """Return what the device did in each marked step, in the order of starting; nothing for a CPU.

    A kernel belongs to a graph if its launch was a graph's: CUPTI gives all kernels of a replay the
    correlation id of that call.
    """
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    launches = {event.id for event in on_host if "GraphLaunch" in event.name}
    starts = sorted(event.time_range.start for event in on_host if event.name == _STEP)
    steps: list[list[Kernel]] = [[] for _ in starts]
    for event in events:
        if event.device_type == DeviceType.CPU or event.name == _STEP:
            continue
        index = sum(start <= event.time_range.start for start in starts) - 1
        if index >= 0:
            when = event.time_range
            steps[index].append(Kernel(event.name, when.start, when.end, event.id in launches))
    return [sorted(step, key=lambda kernel: kernel.start_us) for step in steps]


def kernel_rows(steps: Sequence[Sequence[Kernel]]) -> list[dict[str, Any]]:
    """Return a row a kernel name, the longest first: calls and µs a step."""
    totals: dict[tuple[str, bool], list[float]] = {}
    for kernel in (kernel for step in steps for kernel in step):
        total = totals.setdefault((kernel.name, kernel.in_graph), [0.0, 0.0])
        total[0] += 1
        total[1] += kernel.end_us - kernel.start_us
    kinds = {
        (name, in_graph): {"kind": _kind(name), "in_graph": in_graph, "name": name}
        for name, in_graph in totals
    }
    return _ranked([(kinds[key], calls, us) for key, (calls, us) in totals.items()], len(steps))


def _kind(name: str) -> str:
    return "copy" if name.startswith(("Memcpy", "Memset")) else "kernel"


def operator_rows(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return a row an operator by its own time on the CPU, without what it calls."""
    totals: dict[str, list[float]] = {}
    num_steps = 0
    for event in events:
        if event.name == _STEP:
            num_steps += 1
            continue
        total = totals.setdefault(event.name, [0.0, 0.0])
        total[0] += 1
        total[1] += event.self_cpu_time_total
    named = [
        ({"kind": "operator", "in_graph": None, "name": name}, calls, us)
        for name, (calls, us) in totals.items()
    ]
    return _ranked(named, num_steps)


def _ranked(named: list[tuple[dict[str, Any], float, float]], num_steps: int) -> list[dict[str, Any]]:
    whole = sum(us for _, _, us in named) or 1.0
    return [
        {**name, "num_calls": calls / num_steps, "time_us": us / num_steps, "share": us / whole}
        for name, calls, us in sorted(named, key=lambda row: -row[2])
    ]


_SHAPE = ("num_kernels", "num_outside", "kernel_us", "busy_us", "span_us", "gap_us", "longest_gap_us")


def shape_of(steps: Sequence[Sequence[Kernel]]) -> dict[str, float | None]:
    """Return how the device's work lies in time, medians over the steps; all None if no kernel was seen.

    `num_kernels` (kernels, copies and fills) inside the graph, or of the step where there is none, and
    `num_outside` it; `kernel_us`, the sum of their times, and `busy_us`, in which at least one ran;
    `span_us` from the first start to the last end, `gap_us` of that in which nothing ran, and the longest gap.
    """
    shapes = [_shape(step) for step in steps if step]
    return {name: median(shape[name] for shape in shapes) if shapes else None for name in _SHAPE}


def _shape(step: Sequence[Kernel]) -> dict[str, float]:
    inside = [kernel for kernel in step if kernel.in_graph] or list(step)
    busy_us, longest_gap_us, end_us = 0.0, 0.0, inside[0].start_us
    for kernel in inside:  # kernels may overlap: programmatic launches start before the one before ends
        longest_gap_us = max(longest_gap_us, kernel.start_us - end_us)
        busy_us += max(0.0, kernel.end_us - max(end_us, kernel.start_us))
        end_us = max(end_us, kernel.end_us)
    span_us = end_us - inside[0].start_us
    return {
        "num_kernels": len(inside),
        "num_outside": len(step) - len(inside),
        "kernel_us": sum(kernel.end_us - kernel.start_us for kernel in inside),
        "busy_us": busy_us,
        "span_us": span_us,
        "gap_us": span_us - busy_us,
        "longest_gap_us": longest_gap_us,
    }
