"""Compiles CUDA C++ while the program runs, and launches it with clusters and dependent launch.

NVRTC and the driver are reached by NVIDIA's `cuda-bindings`, which torch's wheels for CUDA bring along. A kernel
takes 0.1 s to compile: none is kept on disk.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from runners.models.fused.launch import compile_beside, compiles_only

#: Warps of a CTA that any device takes.
MAX_WARPS = 32
#: By the type of a tensor the ELEMENT that `kernels/fragments.cuh` knows it as.
ELEMENTS = {torch.bfloat16: 0, torch.float16: 1}
#: What is wrong where `is_available` says no.
MISSING = "cuda-bindings or the NVRTC library is missing"
#: How an argument of a kernel is passed.
_C_TYPES = ((torch.Tensor, ctypes.c_void_p), (int, ctypes.c_int), (float, ctypes.c_float))


@cache
def is_available() -> bool:
    """Whether the bindings are installed and find the NVRTC library."""
    try:
        from cuda.bindings import nvrtc

        _checked(nvrtc.nvrtcVersion())
    except (ImportError, RuntimeError):
        return False
    return True


@cache
def compile_cubin(source: Path, architecture: str, defines: tuple[tuple[str, int], ...]) -> bytes:
    """Machine code of the CUDA file `source` for `architecture` (as `sm_90`).

    RuntimeError with the compiler's log if it refuses.
    """
    from cuda.bindings import nvrtc

    program = _checked(nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), 0, [], []))
    options = [
        f"--gpu-architecture={architecture}", "--std=c++17", f"--include-path={source.parent}", "--disable-warnings",
        *(f"-D{k}={v}" for k, v in defines),
    ]  # fmt: skip
    (failed,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if failed != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytes(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        nvrtc.nvrtcDestroyProgram(program)
        # What is wrong comes first: a record keeps the beginning alone. The log ends with a zero byte.
        reason = log.rstrip(b"\0").decode(errors="replace").strip()
        raise RuntimeError(f"NVRTC refused {source.name}: {reason} (with {dict(defines)})")
    cubin = bytes(_checked(nvrtc.nvrtcGetCUBINSize(program)))
    _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    nvrtc.nvrtcDestroyProgram(program)
    return cubin


def architecture_of(device: torch.device) -> str:
    """The name by which NVRTC knows the architecture of `device`."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def unusable_reason(device: torch.device, capability: tuple[int, int]) -> str | None:
    """Why no kernel that needs this compute capability runs on `device`; None if one may."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < capability:
        return "it needs a CUDA device of capability {}.{}".format(*capability)
    return None if is_available() else MISSING


def lacks_shared_memory(device: torch.device, needed: int) -> str | None:
    """Why no CTA that needs so many bytes of shared memory runs on the CUDA device; None if one does."""
    # Older versions of torch do not know it, and leave it to the launch.
    room = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", needed)
    if needed > room:
        return f"its CTAs need {needed} bytes of shared memory, and the device has {room}"
    return None


@cache
def load_function(
    source: Path, name: str, defines: tuple[tuple[str, int], ...], shared_bytes: int, device: torch.device
) -> Any:
    """The kernel `name` of `source`, compiled for `device`, which must be the current one: a `CUfunction`.

    RuntimeError if NVRTC or the driver refuses.
    """
    from cuda.bindings import driver

    # Loads into the context that torch made current.
    module = _checked(driver.cuModuleLoadData(compile_cubin(source, architecture_of(device), defines)))
    function = _checked(driver.cuModuleGetFunction(module, name.encode()))
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuFuncSetAttribute(function, limit, shared_bytes))
    return function


def launch_cuda(
    source: Path,
    name: str,
    defines: Mapping[str, int],
    arguments: Sequence[torch.Tensor | int | float],
    *,
    grid: int,
    threads: int,
    shared_bytes: int,
    cluster: int,
    pdl: bool,
    device: torch.device,
) -> None:
    """Queue the kernel `name` of `source` on the current stream of `device`; within `compile_ahead` only compile it.

    Args:
        arguments: tensors by address, integers as int32, floats as float32.
        shared_bytes: of dynamic shared memory, a CTA.
        cluster: CTAs of a cluster.
        pdl: let it start while the kernel before it runs.

    RuntimeError if the driver refuses.
    """
    variant = tuple(defines.items())
    if compiles_only():
        compile_beside(compile_cubin, source, architecture_of(device), variant)
        return
    from cuda.bindings import driver

    function = load_function(source, name, variant, shared_bytes, device)
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = torch.cuda.current_stream(device).cuda_stream
    ids, attributes = driver.CUlaunchAttributeID, []
    if cluster > 1:
        value = driver.CUlaunchAttributeValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = cluster, 1, 1
        attributes.append(_attribute(ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value))
    if pdl:
        value = driver.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        attributes.append(_attribute(ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, value))
    config.attrs, config.numAttrs = attributes, len(attributes)
    _checked(driver.cuLaunchKernelEx(config, function, _packed(arguments), 0))


def _attribute(kind: Any, value: Any) -> Any:
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id, attribute.value = kind, value
    return attribute


def _packed(arguments: Sequence[torch.Tensor | int | float]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    values = tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments)
    types = tuple(next(c for kind, c in _C_TYPES if isinstance(a, kind)) for a in arguments)
    return values, types


def _checked(result: tuple[Any, ...]) -> Any:
    """What a call of the bindings returned beside its status. RuntimeError if that is none of success."""
    status, *rest = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA: {status!r}")
    return rest[0] if rest else None
