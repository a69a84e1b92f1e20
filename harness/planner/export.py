"""A capture list as the flags of an engine."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from harness.errors import ConfigError


@dataclass(frozen=True)
class EngineFlags:
    """What to give an engine so that it captures a list."""

    engine: str
    #: One line for the command line.
    flags: str
    #: The release or commit whose source and documentation the flags were read from.
    checked_against: str
    #: A configuration file for an engine that takes the list there.
    config: str | None = None
    #: The release that the flags are for, where it is another than the one they were checked against.
    unchecked_version: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def checked(self) -> str:
        """What the flags were checked against, and that they are unchecked for another release."""
        if self.unchecked_version is None:
            return f"checked against {self.checked_against}"
        return (
            f"UNCHECKED for version {self.unchecked_version}: only {self.checked_against} was checked; compare with the "
            "--help of yours"
        )


#: Whose source, package or reference the flags were read from: vllm/engine/arg_utils.py and, for speculative
#: decoding, config/compilation.py and v1/worker/gpu/cudagraph_utils.py of the source package (0.30.0 too);
#: sglang/srt/arg_groups/fields of the wheel; the LLM API reference (DecodeCudaGraphConfig); lmdeploy/cli of the
#: wheel.
_VLLM = "vLLM 0.33.0"
_SGLANG = "SGLang 0.5.23"
_TENSORRT_LLM = "TensorRT-LLM 1.4.0rc1"
_LMDEPLOY = "LMDeploy 0.18.0"

#: First vLLM for which the two flags are written; the compilation config works in all.
_VLLM_FLAG = (0, 12)
#: SGLang renamed --cuda-graph-bs with its per-phase settings (sglang#23906): 0.5.13 has the old names only,
#: 0.5.14 both, and 0.5.23 the new ones only.
_SGLANG_RENAMED = (0, 5, 14)
#: trtllm-serve called --config --extra_llm_api_options before.
_TENSORRT_LLM_CONFIG = (1, 2)


def export_flags(
    engine: str,
    sizes: Sequence[int],
    max_batch_size: int | None = None,
    engine_version: str | None = None,
    tokens_per_request: int = 1,
) -> EngineFlags:
    """Return the flags with which `engine` captures `sizes`.

    Sizes above `max_batch_size` (the engine's own limit on running requests) are dropped and the maximum
    is appended, so that every batch has a graph; without it the list's own end is the maximum.
    `tokens_per_request` is what a request decodes in a step: 1, or one more than the speculative tokens.
    Raises ConfigError for an unknown engine, a list that is empty or not positive, or a version that is
    no version.
    """
    if engine not in ENGINES:
        raise ConfigError("--engine", engine, f"choose one of {', '.join(ENGINES)}")
    if not sizes or min(sizes) < 1:
        raise ConfigError("LIST", list(sizes), "give at least one size, each 1 or more")
    maximum = max_batch_size or max(sizes)
    if maximum < 1:
        raise ConfigError("--max-batch-size", maximum, "must be at least 1")
    if tokens_per_request < 1:
        raise ConfigError("--tokens-per-request", tokens_per_request, "must be at least 1")
    clipped = sorted({size for size in sizes if size <= maximum} | {maximum})
    version = _version(engine_version)
    flags = ENGINES[engine](clipped, version, tokens_per_request)
    if version is not None and not _is_same(version, _version(flags.checked_against.split()[-1])):
        flags = replace(flags, unchecked_version=engine_version)
    dropped = sorted({size for size in sizes if size > maximum})
    if not dropped:
        return flags
    note = f"left out, as they are above --max-batch-size {maximum}: {' '.join(map(str, dropped))}"
    return replace(flags, notes=(note, *flags.notes))


def _vllm(sizes: list[int], version: tuple[int, ...] | None, tokens_per_request: int) -> EngineFlags:
    """Sizes are tokens: under speculative decoding a request has several in a step.

    vLLM rounds each size up to a multiple of them, which leaves these as they are.
    """
    tokens = [size * tokens_per_request for size in sizes]
    notes = []
    if tokens_per_request > 1:
        notes.append(f"sizes are tokens: {tokens_per_request} a request under speculative decoding")
    if version is not None and version < _VLLM_FLAG:
        compilation = json.dumps({"cudagraph_capture_sizes": tokens}, separators=(",", ":"))
        flags = f"--compilation-config '{compilation}'"
    else:
        listed = " ".join(map(str, tokens))
        flags = f"--cudagraph-capture-sizes {listed} --max-cudagraph-capture-size {tokens[-1]}"
    return EngineFlags("vllm", f"{flags} --max-num-seqs {sizes[-1]}", _VLLM, notes=tuple(notes))


def _sglang(sizes: list[int], version: tuple[int, ...] | None, tokens_per_request: int) -> EngineFlags:
    """Sizes are requests, also under speculative decoding."""
    is_new = version is None or version >= _SGLANG_RENAMED
    suffix = "-decode" if is_new else ""
    listed = " ".join(map(str, sizes))
    flags = f"--cuda-graph-bs{suffix} {listed} --cuda-graph-max-bs{suffix} {sizes[-1]}"
    note = (
        "up to 0.5.13 the flags are --cuda-graph-bs and --cuda-graph-max-bs: give --engine-version"
        if is_new
        else "from 0.5.14 on the flags are --cuda-graph-bs-decode and --cuda-graph-max-bs-decode"
    )
    return EngineFlags("sglang", f"{flags} --max-running-requests {sizes[-1]}", _SGLANG, notes=(note,))


def _tensorrt_llm(sizes: list[int], version: tuple[int, ...] | None, tokens_per_request: int) -> EngineFlags:
    """Without `enable_padding` only batches of exactly a captured size replay a graph."""
    config = "\n".join(
        [
            f"max_batch_size: {sizes[-1]}",
            "cuda_graph_config:",
            "  enable_padding: true",
            f"  batch_sizes: [{', '.join(map(str, sizes))}]",
            "",
        ]
    )
    is_old = version is not None and version < _TENSORRT_LLM_CONFIG
    option = "--extra_llm_api_options" if is_old else "--config"
    note = "max_batch_size of cuda_graph_config is left out: it is derived, and refused if it differs"
    return EngineFlags("tensorrt_llm", f"{option} config.yaml", _TENSORRT_LLM, config, notes=(note,))


def _lmdeploy(sizes: list[int], version: tuple[int, ...] | None, tokens_per_request: int) -> EngineFlags:
    listed = " ".join(map(str, sizes))
    return EngineFlags(
        "lmdeploy",
        f"--backend pytorch --cudagraph-capture-batch-sizes {listed} --max-batch-size {sizes[-1]}",
        _LMDEPLOY,
        notes=("older releases without the flag capture powers of two: their list cannot be set",),
    )


_Writer = Callable[[list[int], tuple[int, ...] | None, int], EngineFlags]
ENGINES: dict[str, _Writer] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "tensorrt_llm": _tensorrt_llm,
    "lmdeploy": _lmdeploy,
}


def _is_same(version: tuple[int, ...], other: tuple[int, ...] | None) -> bool:
    return all(one == two for one, two in itertools.zip_longest(version, other or (), fillvalue=0))


def _version(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    match = re.match(r"v?(\d+(?:\.\d+)*)", text)
    if match is None:
        raise ConfigError("--engine-version", text, "write a version such as 0.11.0")
    return tuple(int(part) for part in match[1].split("."))
