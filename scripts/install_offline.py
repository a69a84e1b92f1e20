#!/usr/bin/env python3
"""Install a prepared bundle where there is no network.

    install_offline.py BUNDLE [--target FOLDER]

Installs BUNDLE/wheels and puts BUNDLE/kernels where FlashInfer looks for libraries built ahead of
time. With --target everything goes to that folder, and PYTHONPATH has to name it. Needs only pip.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path


def main() -> int:
    options = parse_arguments()
    install_wheels(options.bundle / "wheels", options.target)
    if options.target is not None:
        sys.path.insert(0, str(options.target))
    kernels = options.bundle / "kernels"
    if kernels.is_dir():
        check_versions(kernels / "manifest.json")
        count = place_kernels(kernels, find_flashinfer() / "data" / "aot")
        print(f"{count} kernels placed. FLASHINFER_DISABLE_JIT=1 proves that nothing is compiled.")
    if options.target is not None:
        print(f"export PYTHONPATH={options.target.resolve()}")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path, help="the prepared folder")
    parser.add_argument("--target", type=Path, help="install here rather than into the environment")
    return parser.parse_args()


def install_wheels(folder: Path, target: Path | None) -> None:
    """Install every wheel of the folder, exactly these and nothing else."""
    wheels = sorted(str(wheel) for wheel in folder.glob("*.whl"))
    if not wheels:
        return
    where = [] if target is None else ["--target", str(target), "--upgrade"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", *where, *wheels]
    subprocess.run(command, check=True)
    print(f"{len(wheels)} wheels installed.")


def find_flashinfer() -> Path:
    """Return FlashInfer's package folder, without importing it."""
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        sys.exit("the bundle has kernels, but flashinfer-python is neither in it nor installed.")
    return Path(spec.origin).parent


def check_versions(manifest: Path) -> None:
    """Refuse kernels built with other versions: FlashInfer would call them with other arguments."""
    built_with = json.loads(manifest.read_text())["built_with"]
    for package in ("flashinfer-python", "apache-tvm-ffi"):
        here = importlib.metadata.version(package)
        if here != built_with[package]:
            sys.exit(
                f"the kernels were built with {package} {built_with[package]}, but {here} is installed: install "
                "that version, or build the kernels again."
            )


def place_kernels(kernels: Path, aot: Path) -> int:
    """Copy each library to `<aot>/<name>/<name>.so`; return how many there are."""
    libraries = sorted(kernels.glob("*/*.so"))
    for library in libraries:
        target = aot / library.parent.name / library.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(library, target)
    return len(libraries)


if __name__ == "__main__":
    sys.exit(main())
