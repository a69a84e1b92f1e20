#!/usr/bin/env python3
"""Compile FlashInfer's kernels ahead of time, for a named architecture, on a machine without a GPU.

    build_kernels.py BUNDLE --arch 9.0a --head-dim 64 128

Needs nvcc, gcc, and the flashinfer-python that the GPU machine will have. Each library goes to
BUNDLE/kernels/<name>/<name>.so, and BUNDLE/kernels/manifest.json says what they were built with;
install_offline.py puts them where FlashInfer looks. A library that is there already is kept.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: Kernels that do not depend on the model's shapes.
SHAPELESS = ("page", "rope", "norm", "silu", "sampling")
KINDS = ("decode", "fa2", "fa3", *SHAPELESS)
#: Headers that norm, sampling and FA3 include and a bare nvcc lacks; pip has them.
HEADER_PACKAGES = ("nvidia-curand", "nvidia-cublas")


def main() -> int:
    options = parse_arguments()
    if shutil.which("nvcc") is None and "CUDA_HOME" not in os.environ:
        sys.exit("nvcc is not on the PATH and CUDA_HOME is not set: install the CUDA compiler first.")
    with tempfile.TemporaryDirectory(prefix="kernels-") as workspace:
        prepare_environment(options.arch, options.jobs, Path(workspace))
        seconds = build(list(plan_builds(options)), options.bundle / "kernels")
    write_manifest(options.bundle / "kernels", options.arch, seconds)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path, help="the folder to fill")
    parser.add_argument("--arch", required=True, help="compute capability: 8.0, 8.9, 9.0a, 10.0a, …")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS), help="kernels to build")
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], help="of the queries")
    parser.add_argument("--kv-dtype", nargs="+", default=["auto"], help="of the cache; auto: the queries'")
    parser.add_argument("--window", action="store_true", help="with a sliding window (instead of without)")
    parser.add_argument("--soft-cap", action="store_true", help="with a soft cap (instead of without)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at a time")
    return parser.parse_args()


# --- environment -------------------------------------------------------------------------------


def prepare_environment(arch: str, jobs: int, workspace: Path) -> None:
    """Set what FlashInfer reads when it is imported."""
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = arch
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(workspace)
    os.environ["MAX_JOBS"] = str(jobs)
    os.environ["FLASHINFER_EXTRA_LDFLAGS"] = f"-L{make_driver_stub(workspace)}"
    includes = " ".join(f"-isystem {folder}" for folder in header_folders())
    os.environ["FLASHINFER_EXTRA_CUDAFLAGS"] = includes
    os.environ.pop("FLASHINFER_DISABLE_JIT", None)


def make_driver_stub(workspace: Path) -> Path:
    """Make an empty libcuda.so to link against: the real one comes with the driver, on the GPU machine."""
    folder = workspace / "stub"
    folder.mkdir()
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / "libcuda.so")]
    subprocess.run([*command, "-Wl,-soname,libcuda.so.1"], input=b"", check=True)
    return folder


def header_folders() -> list[Path]:
    """Include folders of the nvidia wheels that are installed."""
    site = Path(sysconfig.get_paths()["purelib"])
    return sorted(folder for folder in site.glob("nvidia/*/include") if folder.is_dir())


# --- what to build -----------------------------------------------------------------------------


def plan_builds(options: argparse.Namespace) -> Iterator[Any]:
    """Yield FlashInfer's description of each library (a JitSpec). Imports FlashInfer."""
    import torch
    from flashinfer.jit.activation import gen_act_and_mul_module
    from flashinfer.jit.norm import gen_norm_module
    from flashinfer.jit.page import gen_page_module
    from flashinfer.jit.rope import gen_rope_module
    from flashinfer.jit.sampling import gen_sampling_module

    shapeless: dict[str, Callable[[], Any]] = {
        "page": gen_page_module,
        "rope": gen_rope_module,
        "norm": gen_norm_module,
        "silu": lambda: gen_act_and_mul_module("silu"),
        "sampling": gen_sampling_module,
    }
    for head_dim, dtype, kv_dtype in itertools.product(options.head_dim, options.dtype, options.kv_dtype):
        query = getattr(torch, dtype)
        cache = query if kv_dtype == "auto" else getattr(torch, kv_dtype)
        shape = {
            "dtype_q": query,
            "dtype_kv": cache,
            "dtype_o": query,
            "dtype_idx": torch.int32,
            "head_dim_qk": head_dim,
            "head_dim_vo": head_dim,
            "pos_encoding_mode": 0,
            "use_sliding_window": options.window,
            "use_logits_soft_cap": options.soft_cap,
        }
        for kind in options.kind:
            if kind not in shapeless and not (kind == "fa3" and cache != query):
                yield attention(kind, shape)
    for kind in options.kind:
        if kind in shapeless:
            yield shapeless[kind]()


def attention(kind: str, shape: dict[str, Any]) -> Any:
    """Describe the library of an attention kernel, as the installed version loads it."""
    from flashinfer.jit.attention import gen_batch_decode_module, gen_batch_prefill_module, modules

    if kind == "decode":
        return gen_batch_decode_module(**shape)
    # 0.7.4 loads FA2 as a library for equal strides of keys and values, and one for unequal: only the
    # first is used here.
    generate = getattr(modules, "_gen_batch_prefill_primary_module", gen_batch_prefill_module)
    if kind == "fa3":
        generate = gen_batch_prefill_module
    return generate(kind, **shape, use_fp16_qk_reduction=False)


# --- building ----------------------------------------------------------------------------------


def build(specs: list[Any], target: Path) -> dict[str, float]:
    """Compile what is not in `target` yet; return the seconds that each library took."""
    seconds = {}
    for i, spec in enumerate(specs, 1):
        library = target / spec.name / f"{spec.name}.so"
        if library.exists():
            print(f"[{i}/{len(specs)}] {spec.name}: there already", flush=True)
            continue
        started = time.monotonic()
        spec.build(verbose=False)
        library.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(spec.jit_library_path, library)
        seconds[spec.name] = round(time.monotonic() - started, 1)
        print(f"[{i}/{len(specs)}] {spec.name}: {seconds[spec.name]} s", flush=True)
    return seconds


def write_manifest(folder: Path, arch: str, seconds: dict[str, float]) -> None:
    """Record what the libraries were built with; refuse to mix two makes in one folder."""
    path = folder / "manifest.json"
    built_with = {
        "arch": arch,
        "flashinfer-python": importlib.metadata.version("flashinfer-python"),
        "apache-tvm-ffi": importlib.metadata.version("apache-tvm-ffi"),
    }
    manifest = json.loads(path.read_text()) if path.exists() else {"built_with": built_with, "seconds": {}}
    if manifest["built_with"] != built_with:
        sys.exit(f"{folder} holds kernels built with {manifest['built_with']}, these with {built_with}.")
    manifest["seconds"] |= seconds
    path.write_text(json.dumps(manifest, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
