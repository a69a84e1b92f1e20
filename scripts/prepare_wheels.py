#!/usr/bin/env python3
"""Collect the wheels that a GPU machine without a network lacks.

    prepare_wheels.py BUNDLE --python 3.12 --present present.txt

`present.txt` is `python3 -m pip list --format=freeze` of that machine: what stands there is not
fetched, and neither are torch, CUDA's libraries and cuda-bindings, which must be there already.
Beginning with this project's dependencies, every wheel's own requirements are followed. Wheels go to
BUNDLE/wheels; install_offline.py installs them. Kernels built ahead of time need exactly the versions
that they were built with: --pin flashinfer-python==0.7.4 apache-tvm-ffi==0.1.15.post2
"""

from __future__ import annotations

import argparse
import email
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
#: Come with the machine's CUDA installation; several GB each, and a wrong pair breaks it.
NEVER_FETCHED = re.compile(r"torch|triton|nvidia-(?!ml-py).*|cuda-.*|.*nccl.*")
#: manylinux tags that pip accepts as they are; it matches them one by one.
GLIBC_MINORS = (17, 24, 26, 27, 28, 31, 34, 35, 39)
#: Parts of FlashInfer's wheel that only a compiler reads.
SOURCES = re.compile(r"flashinfer/data/(cutlass|cccl|spdlog|include)/|flashinfer/data/csrc/.*/")


def main() -> int:
    options = parse_arguments()
    target = Target(options.python, options.glibc)
    wheels = options.bundle / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    present = read_present(options.present)
    pins = {canonicalize_name(pin.name): pin for pin in options.pin}
    for requirement in project_requirements():
        collect(requirement, target, wheels, present, pins)
    if options.without_sources:
        for wheel in wheels.glob("flashinfer_python-*.whl"):
            drop_sources(wheel)
    size = sum(wheel.stat().st_size for wheel in wheels.iterdir())
    print(f"{len(list(wheels.iterdir()))} wheels, {size / 2**20:.0f} MiB, in {wheels}")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path, help="the folder to fill")
    parser.add_argument("--python", required=True, help="the GPU machine's version, as 3.12")
    parser.add_argument("--glibc", type=int, default=28, help="minor version of its glibc 2.x")
    parser.add_argument("--present", type=Path, help="pip list --format=freeze of the GPU machine")
    parser.add_argument("--pin", type=Requirement, nargs="+", default=[], help="versions to fetch")
    parser.add_argument(
        "--without-sources",
        action="store_true",
        help="leave out what only a compiler reads: FlashInfer's wheel shrinks, prebuilt kernels alone run",
    )
    return parser.parse_args()


class Target:
    """The machine that the wheels are for: Linux on x86-64."""

    def __init__(self, python: str, glibc: int) -> None:
        self.environment = {
            "python_version": python,
            "python_full_version": f"{python}.0",
            "sys_platform": "linux",
            "platform_system": "Linux",
            "platform_machine": "x86_64",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "os_name": "posix",
        }
        minors = sorted((minor for minor in GLIBC_MINORS if minor <= glibc), reverse=True)
        platforms = [f"manylinux_2_{minor}_x86_64" for minor in minors]
        self.pip_options = ["--python-version", python, "--implementation", "cp"]
        for platform in (*platforms, "manylinux2014_x86_64", "manylinux1_x86_64"):
            self.pip_options += ["--platform", platform]


# --- which ones --------------------------------------------------------------------------------


def project_requirements() -> Iterator[Requirement]:
    """Yield what this project needs on a GPU machine: its dependencies and its extra `gpu`."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    for text in (*project["dependencies"], *project["optional-dependencies"]["gpu"]):
        yield Requirement(text)


def read_present(path: Path | None) -> set[str]:
    """Return the names in a `pip list --format=freeze`."""
    lines = path.read_text().splitlines() if path else []
    return {canonicalize_name(re.split(r"[=@ ]", line)[0]) for line in lines if line.strip()}


def collect(
    requirement: Requirement, target: Target, wheels: Path, present: set[str], pins: dict[str, Requirement]
) -> None:
    """Fetch a requirement, then what its wheel requires; `present` grows by what was handled."""
    name = canonicalize_name(requirement.name)
    if name in present or NEVER_FETCHED.fullmatch(name):
        return
    present.add(name)
    wheel = fetch(pins.get(name, requirement), target, wheels)
    print(wheel.name, flush=True)
    for needed in requirements_of(wheel):
        if needed.marker is None or needed.marker.evaluate({**target.environment, "extra": ""}):
            collect(needed, target, wheels, present, pins)


def requirements_of(wheel: Path) -> list[Requirement]:
    """Return a wheel's own requirements, extras included (their markers tell)."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    return [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]


# --- fetching ----------------------------------------------------------------------------------


def fetch(requirement: Requirement, target: Target, wheels: Path) -> Path:
    """Download the wheel of a requirement, or build it from source where there is none."""
    wanted = f"{requirement.name}{requirement.specifier}"
    with tempfile.TemporaryDirectory() as folder:
        download = ["download", "--only-binary=:all:", "-d", folder, *target.pip_options, wanted]
        # Source only (antlr4-python3-runtime): pure Python, so a wheel made here fits there.
        if not pip(download) and not pip(["wheel", "-w", folder, wanted]):
            sys.exit(f"no wheel of {wanted} for this target, and none could be built.")
        fetched = next(Path(folder).glob("*.whl"))
        return Path(shutil.copy(fetched, wheels))


def pip(arguments: list[str]) -> bool:
    command = [sys.executable, "-m", "pip", arguments[0], "--quiet", "--no-deps", *arguments[1:]]
    return subprocess.run(command, capture_output=True).returncode == 0


# --- shrinking ---------------------------------------------------------------------------------


def drop_sources(wheel: Path) -> None:
    """Rewrite a FlashInfer wheel without its compiler's inputs. It is no longer the published file."""
    lean = wheel.with_suffix(".lean")
    with (
        zipfile.ZipFile(wheel) as old,
        zipfile.ZipFile(lean, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new,
    ):
        for item in old.infolist():
            if not SOURCES.match(item.filename):
                new.writestr(item, old.read(item), zipfile.ZIP_DEFLATED, 9)
    lean.replace(wheel)


if __name__ == "__main__":
    sys.exit(main())
