"""Which batch sizes to capture: the schedules of the engines, and the rule that every batch is covered.

Each schedule is what the engine captures by default for a given ceiling, in its release named in
`POLICIES`, read from its source. On top of it comes the coverage rule: most engines stop at the last
stride below the ceiling, so that the busiest batches run without a graph (vllm#37865, sglang#21005);
here the ceiling is always captured unless the engine's own gap is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Policy(NamedTuple):
    """How one engine chooses its capture list."""

    #: Ceiling → the engine's sizes; entries above the ceiling are clipped by the caller.
    schedule: Callable[[int], Iterable[int]]
    #: Release and place that the schedule follows; empty for policies that are not an engine's.
    engine_version: str = ""


@dataclass(frozen=True)
class CaptureList:
    """A capture list and the batch sizes above it that no graph covers."""

    #: Sorted, unique, each ≥ 1.
    sizes: tuple[int, ...]
    #: Batch sizes above the largest captured one, up to the maximum; empty when covered.
    gap_batches: range
    #: What the gap costs, for the user; None when covered.
    warning: str | None


def _vllm(max_size: int) -> list[int]:
    return [1, 2, 4, *range(8, 256, 8), *range(256, max_size + 1, 16)]


def _sglang(max_size: int) -> list[int]:
    # Unlike its older releases (sglang#21005), today's SGLang appends the ceiling itself.
    return [*_pymllm(max_size), max_size]


def _pymllm(max_size: int) -> list[int]:
    return [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, max_size + 1, 32)]


def _tensorrt_llm(max_size: int) -> list[int]:
    # With padding enabled, as here; without it the engine captures 1..32 and powers of two.
    return [1, 2, 4, *range(8, 129, 8), *range(192, max_size + 1, 64), max_size]


def _nano_vllm(max_size: int) -> list[int]:
    return [1, 2, 4, 8, *range(16, min(max_size, 512) + 1, 16)]


def _mini_sglang(max_size: int) -> list[int]:
    return [1, 2, 4, *range(8, max_size + 1, 8)]


def _lmdeploy(max_size: int) -> list[int]:
    powers = [size for size in _powers_of_two(max_size) if size <= 256]
    return [*powers, *range(512, max_size + 1, 256), max_size]


def _tgi(max_size: int) -> list[int]:
    return [1, 2, 4, 8, 16, 32]


def _powers_of_two(max_size: int) -> list[int]:
    return [1 << exponent for exponent in range(max_size.bit_length())]


def _all(max_size: int) -> list[int]:
    return list(range(1, max_size + 1))


def _max_only(max_size: int) -> list[int]:
    return [max_size]


#: Policy name → schedule, and the engine's release that it follows.
POLICIES: dict[str, Policy] = {
    "vllm": Policy(_vllm, "vLLM 0.30.0, VllmConfig._set_cudagraph_sizes"),
    "sglang": Policy(_sglang, "SGLang 0.5.23, generate_decode_cuda_graph_batch_sizes"),
    "tensorrt_llm": Policy(
        _tensorrt_llm, "TensorRT-LLM main after 1.2, DecodeCudaGraphConfig, padding enabled"
    ),
    "pymllm": Policy(_pymllm, "mllm 4d3d0c5, pymllm/executor/cuda_graph_runner.py"),
    "nano_vllm": Policy(_nano_vllm, "nano-vllm bb823b3, ModelRunner.capture_cudagraph"),
    "mini_sglang": Policy(_mini_sglang, "mini-sglang 4403076, engine/graph.py"),
    "lmdeploy": Policy(_lmdeploy, "LMDeploy 0.18.0, pytorch/backends/cuda/graph_runner"),
    "tgi": Policy(_tgi, "text-generation-inference 3.3, launcher default of --cuda-graphs"),
    "powers_of_two": Policy(_powers_of_two),
    "all": Policy(_all),
    "max_only": Policy(_max_only),
}


def capture_sizes(
    policy: str, max_size: int, *, sizes: Sequence[int] | None = None, allow_gap: bool = False
) -> CaptureList:
    """Return the capture list of `policy` for batches up to `max_size`.

    Args:
        policy: a key of `POLICIES`, or `explicit`.
        max_size: the largest batch size to cover, ≥ 1.
        sizes: the list itself, for `explicit` only.
        allow_gap: keep the engine's own gap below `max_size` instead of appending `max_size`.

    Raises:
        ValueError: unknown policy, a size out of range, or an explicit list that ends below
            `max_size` without `allow_gap`. The message names the field and the remedy.
    """
    if max_size < 1:
        raise ValueError(f"capture.max_size={max_size}: must be at least 1.")
    if policy == "explicit":
        listed = _check_explicit(sizes, max_size, allow_gap)
    elif sizes:
        raise ValueError(
            f"capture.sizes={list(sizes)} goes with capture.policy=explicit, not with {policy}: "
            "set capture.policy=explicit, or remove capture.sizes."
        )
    else:
        listed = _scheduled(policy, max_size, allow_gap)
    return _describe(policy, listed, max_size)


def _scheduled(policy: str, max_size: int, allow_gap: bool) -> set[int]:
    if policy == "planned":
        raise ValueError(
            "capture.policy=planned is a file, not a schedule: read its sizes and give them to policy explicit."
        )
    if policy not in POLICIES:
        raise ValueError(f"capture.policy={policy} is unknown: choose from explicit, {', '.join(POLICIES)}.")
    clipped = {size for size in POLICIES[policy].schedule(max_size) if size <= max_size}
    return clipped if allow_gap else clipped | {max_size}


def _check_explicit(sizes: Sequence[int] | None, max_size: int, allow_gap: bool) -> set[int]:
    if not sizes:
        raise ValueError("capture.sizes is empty: capture.policy=explicit needs a list such as [1,2,4].")
    too_small, too_large = [s for s in sizes if s < 1], [s for s in sizes if s > max_size]
    if too_small:
        raise ValueError(f"capture.sizes has {too_small}: every capture size must be at least 1.")
    if too_large:
        raise ValueError(
            f"capture.sizes has {too_large}, above the maximum of {max_size}: remove them, or raise "
            "capture.max_size and runner.max_batch_size."
        )
    if max(sizes) < max_size and not allow_gap:
        raise ValueError(
            f"capture.sizes ends at {max(sizes)}, so batches {max(sizes) + 1}..{max_size} have no graph: add "
            f"{max_size}, lower capture.max_size to {max(sizes)}, or set capture.allow_gap=true."
        )
    return set(sizes)


def _describe(policy: str, listed: set[int], max_size: int) -> CaptureList:
    ordered = tuple(sorted(listed))
    gap = range(ordered[-1] + 1, max_size + 1)
    if not gap:
        return CaptureList(ordered, gap, None)
    remedy = "set capture.allow_gap=false to capture the maximum too"
    if policy == "explicit":
        remedy = f"add {max_size} to capture.sizes to capture the maximum too"
    warning = (
        f"the capture list ends at {ordered[-1]}, so batches {gap.start}..{max_size} run without a graph of "
        f"their own (runner.above_max decides how): {remedy}."
    )
    return CaptureList(ordered, gap, warning)
