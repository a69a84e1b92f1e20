"""What the terminal and the report show of a profile."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_NOISE = re.compile(r"^(void|auto) |\(anonymous namespace\)::|at::native::|\{lambda.*?\}")


def short_name(name: str, length: int) -> str:
    """Return a kernel's name without what C++ and templates add, cut to `length` characters."""
    plain = _NOISE.sub("", name)
    return plain if len(plain) <= length else plain[: length - 1] + "…"


def main_graph(graphs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the largest graph; the largest eager step where none was captured."""
    return max(graphs, key=lambda shape: (shape["mode"] != "eager", shape["batch_size"]), default=None)


def shape_line(shape: Mapping[str, Any]) -> str:
    """Say in a line how the kernels of a step lie in time."""
    where = "the step" if shape["mode"] == "eager" else "the graph"
    return (
        f"{shape['num_kernels']:.0f} kernels, copies and fills in {where} at batch {shape['batch_size']}, "
        f"{shape['num_outside']:.0f} around it: {shape['busy_us']:.0f} µs busy of {shape['span_us']:.0f}, "
        f"{shape['gap_us']:.0f} µs of gaps, the longest {shape['longest_gap_us']:.1f} (profiled, not timed)"
    )
