"""What the source of a CUDA kernel says of itself, for the tests that hold Python's words against it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from runners.models.fused import nvrtc

needs_nvrtc = pytest.mark.skipif(
    not nvrtc.is_available(), reason=f"{nvrtc.MISSING}: pip install cuda-bindings"
)


def constants(source: Path, defines: dict[str, int]) -> dict[str, int]:
    """The integer constants of `source` under `defines`."""
    found = {**defines}
    for declared in re.findall(r"^constexpr int (.*?);", source.read_text(), re.MULTILINE):
        for name, value in re.findall(r"(\w+) = ([^,]+)", declared):
            found[name] = _evaluated(value, found)
    return found


def offsets(source: Path, size: dict[str, int], *patterns: str) -> list[int]:
    """What the group of each pattern, found in `source`, comes to by the constants `size`."""
    text, values = source.read_text(), []
    for pattern in patterns:
        found = re.search(pattern, text)
        assert found is not None, pattern
        values.append(_evaluated(found[1], size))
    return values


def argument_types(source: Path, kernel: str) -> list[type]:
    """What `launch_cuda` takes for each argument of `kernel`, in their order."""
    signature = re.search(rf"{kernel}\((.*?)\) \{{", source.read_text(), re.DOTALL)
    assert signature is not None
    declared = re.sub(r"//.*", "", signature[1]).split(",")
    kinds: dict[str, type] = {"*": torch.Tensor, "int ": int, "float ": float}
    return [next(kind for mark, kind in kinds.items() if mark in one) for one in declared]


def _evaluated(expression: str, names: dict[str, int]) -> int:
    chosen = re.sub(r"(\w+) \? (\w+) : (\w+)", r"(\2 if \1 else \3)", expression)
    return int(eval(re.sub(r"(?<!/)/(?!/)", "//", chosen), {}, names))
