"""The verb doctor: what this machine can run, and what is missing, with the fix."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

#: Of memory and of disk: the main job takes less than this of either.
_MIN_FREE_GIB = 2.0
_MIN_FLASHINFER = (0, 6, 13)


class Verdict(StrEnum):
    """How a finding bears on what can be run."""

    OK = "ok"
    LIMITED = "limited"
    MISSING = "MISSING"


@dataclass(frozen=True)
class Finding:
    """One thing looked at: what it is, what it means, and the fix if there is one."""

    subject: str
    verdict: Verdict
    text: str
    fix: str = ""


def run_doctor(argv: list[str]) -> int:
    """Print every finding; 0 if the main job can run on this machine, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m harness doctor",
        description="Say what this machine can run and what is missing, with the fix. Changes nothing.",
        epilog="Exit code: 0 if the main job can run here (on a CPU with emulated graphs), else 1.",
    )
    parser.parse_args(argv)
    findings = list(examine())
    print("\n".join(_lines(findings)))
    return 1 if any(finding.verdict is Verdict.MISSING for finding in findings) else 0


def examine() -> Iterator[Finding]:
    """Yield a finding for each thing that decides what can be run."""
    checks: tuple[Callable[[], Finding], ...] = (
        check_python,
        check_torch,
        check_packages,
        check_gpu,
        check_cuda_graphs,
        check_flashinfer,
        check_nvrtc,
        check_compiler,
        check_wandb,
        check_memory,
        check_disk,
        check_traces,
        check_weights,
    )
    for check in checks:
        yield check()


def check_python() -> Finding:
    """Which Python this is; an older one than pyproject.toml admits cannot import this file."""
    return Finding("python", Verdict.OK, f"{'.'.join(map(str, sys.version_info[:3]))} at {sys.executable}")


def check_torch() -> Finding:
    """torch imports, and says for which device it was built."""
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", Verdict.MISSING, "not installed", "pip install -e . (or make run)")
    import torch

    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    return Finding("torch", Verdict.OK, f"{torch.__version__}, built for {built_for}")


def check_packages() -> Finding:
    """The other packages that every job needs are there."""
    needed = ("transformers", "hydra-core", "omegaconf", "wandb", "pandas", "pyarrow", "rich", "nvidia-ml-py")
    found = {package: _version(package) for package in needed}
    missing = [package for package, version in found.items() if version is None]
    if missing:
        return Finding(
            "packages", Verdict.MISSING, f"not installed: {', '.join(missing)}", "pip install -e ."
        )
    return Finding("packages", Verdict.OK, ", ".join(f"{name} {version}" for name, version in found.items()))


def check_gpu() -> Finding:
    """A GPU is visible to the driver."""
    from harness.nvidia import driver_version, visible_gpus

    if importlib.util.find_spec("pynvml") is None:
        return Finding(
            "gpu",
            Verdict.LIMITED,
            "nvidia-ml-py is not installed: no GPU is seen",
            "pip install nvidia-ml-py",
        )
    driver = driver_version()
    if driver is None:
        return Finding(
            "gpu", Verdict.LIMITED, "no NVIDIA driver: graphs are emulated", "run on a machine with a GPU"
        )
    gpus = visible_gpus()
    if not gpus:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        return Finding(
            "gpu", Verdict.LIMITED, f"driver {driver}, no GPU", f"CUDA_VISIBLE_DEVICES={hidden!r}: unset it"
        )
    names = ", ".join(
        f"cuda:{i} {gpu.name} ({gpu.total_bytes / 2**30:.0f} GiB)" for i, gpu in enumerate(gpus)
    )
    busy = [f"cuda:{i}" for i, gpu in enumerate(gpus) if gpu.used_bytes > 0.1 * gpu.total_bytes]
    if busy:
        fix = "end the other process: latencies and device_bytes are not trustworthy beside it"
        return Finding(
            "gpu", Verdict.LIMITED, f"{names}; driver {driver}; memory in use on {', '.join(busy)}", fix
        )
    return Finding("gpu", Verdict.OK, f"{names}; driver {driver}")


def check_cuda_graphs() -> Finding:
    """torch reaches the GPU, so that graphs are CUDA's and not emulated."""
    from harness.nvidia import visible_gpus

    if importlib.util.find_spec("torch") is None:
        return Finding("cuda graphs", Verdict.LIMITED, "torch is not installed")
    import torch

    if torch.cuda.is_available():
        return Finding("cuda graphs", Verdict.OK, "device=auto runs on CUDA")
    if visible_gpus() and torch.version.cuda is None:
        fix = "install a CUDA build of torch: https://pytorch.org/get-started"
        return Finding(
            "cuda graphs", Verdict.LIMITED, "a GPU is there, but torch is a CPU build: emulated", fix
        )
    if visible_gpus():
        return Finding(
            "cuda graphs", Verdict.LIMITED, "torch cannot reach the GPU: emulated", "update the driver"
        )
    return Finding("cuda graphs", Verdict.LIMITED, "emulated: everything but the latencies of a GPU")


def check_flashinfer() -> Finding:
    """FlashInfer is installed. Not imported: some releases crash beside a CPU torch."""
    version = _version("flashinfer-python")
    if version is None:
        return Finding(
            "flashinfer", Verdict.LIMITED, "not installed: attention=torch", "pip install -e '.[gpu]'"
        )
    digits = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if digits < _MIN_FLASHINFER:
        return Finding(
            "flashinfer",
            Verdict.LIMITED,
            f"{version} is too old",
            "pip install -U 'flashinfer-python>=0.7.1'",
        )
    return Finding("flashinfer", Verdict.OK, version)


def check_nvrtc() -> Finding:
    """Whether the fused layers' CUDA kernels can be compiled."""
    version = _version("cuda-bindings")
    if version is None:
        return Finding(
            "cuda-bindings",
            Verdict.LIMITED,
            "not installed: model.implementation=fused runs up to 32 requests by slower kernels",
            "pip install -e '.[gpu]'",
        )
    return Finding("cuda-bindings", Verdict.OK, version)


def check_compiler() -> Finding:
    """A C++ compiler, for torch.compile on a CPU, and nvcc for kernels that are not built yet."""
    compiler = os.environ.get("CXX") or next(
        (name for name in ("g++", "clang++", "c++") if shutil.which(name)), None
    )
    nvcc = shutil.which("nvcc")
    cuda = f", nvcc at {nvcc}" if nvcc else ", no nvcc"
    if compiler is None:
        return Finding(
            "compiler", Verdict.LIMITED, f"no C++ compiler{cuda}: compile=none only", "apt install g++"
        )
    return Finding("compiler", Verdict.OK, f"{compiler}{cuda}")


def check_wandb() -> Finding:
    """Whether tracking=online can work."""
    version = _version("wandb")
    if version is None:
        return Finding("wandb", Verdict.LIMITED, "not installed: nothing is published", "pip install -e .")
    from harness.wandb_key import has_key

    if has_key():
        return Finding("wandb", Verdict.OK, f"{version}, a key is set: tracking=offline or online")
    return Finding(
        "wandb", Verdict.OK, f"{version}, no key: tracking=offline (for tracking=online: wandb login)"
    )


def check_memory() -> Finding:
    """Enough memory for the main job."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available_gib, total_gib = (int(fields[name].split()[0]) / 2**20 for name in ("MemAvailable", "MemTotal"))
    text = f"{available_gib:.1f} of {total_gib:.1f} GiB free, {os.cpu_count()} cores"
    if available_gib < _MIN_FREE_GIB:
        return Finding("memory", Verdict.LIMITED, text, "the main job takes up to 2 GiB: end other programs")
    return Finding("memory", Verdict.OK, text)


def check_disk() -> Finding:
    """Room and rights where the jobs' folders go."""
    folder = Path("outputs") if Path("outputs").is_dir() else Path()
    free_gib = shutil.disk_usage(folder).free / 2**30
    text = f"{free_gib:.1f} GiB free at {folder.resolve()}"
    if not os.access(folder, os.W_OK):
        return Finding(
            "disk", Verdict.MISSING, f"{folder.resolve()} is not writable", "write output_dir=FOLDER"
        )
    if free_gib < _MIN_FREE_GIB:
        return Finding(
            "disk", Verdict.LIMITED, text, "delete old jobs under outputs/, or write output_dir=FOLDER"
        )
    return Finding("disk", Verdict.OK, text)


def check_traces() -> Finding:
    """Request logs for workload=trace; the tests that need one skip without."""
    folder = Path(os.environ.get("CGH_TRACES", "../shared/traces"))
    logs = [path.name for suffix in ("*.csv", "*.jsonl") for path in sorted(folder.glob(suffix))]
    if logs:
        return Finding("traces", Verdict.OK, f"{len(logs)} in {folder.resolve()}: {', '.join(logs)}")
    fix = "put logs from github.com/Azure/AzurePublicDataset into a folder, and set CGH_TRACES to it"
    return Finding(
        "traces", Verdict.LIMITED, f"no request logs in {folder}: workload=synthetic or steady", fix
    )


def check_weights() -> Finding:
    """Trained weights for model=smollm2_135m; the tests that need them skip without."""
    from harness.model_cache import cached_model, is_fetched

    name = "smollm2_135m"
    if is_fetched(name):
        return Finding("weights", Verdict.OK, f"model={name} at {cached_model(name)}")
    return Finding(
        "weights", Verdict.LIMITED, f"model={name} was not fetched: the other presets only", "make smollm2"
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _lines(findings: list[Finding]) -> Iterator[str]:
    for finding in findings:
        yield f"{finding.verdict:<8} {finding.subject:<12} {finding.text}"
        if finding.fix:
            yield f"{'':<8} {'':<12} fix: {finding.fix}"
    graphs = next(finding for finding in findings if finding.subject == "cuda graphs")
    blocked = [finding.subject for finding in findings if finding.verdict is Verdict.MISSING]
    yield ""
    if blocked:
        yield f"The main job cannot run here until this is fixed: {', '.join(blocked)}."
    elif graphs.verdict is Verdict.OK:
        yield "The main job runs here, with CUDA graphs: python -m harness"
    else:
        yield "The main job runs here, with emulated graphs: python -m harness"
