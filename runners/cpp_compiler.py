"""Whether torch.compile can build kernels for a CPU on this machine. Imports no torch."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path


def missing_for_cpu_kernels() -> str | None:
    """Return what Inductor lacks to build kernels for a CPU, with the remedy; None if nothing.

    Inductor runs the compiler named by CXX, or else g++, on sources that include Python.h.
    """
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler.split()[0]) is None:
        return f"no C++ compiler ({compiler}): install one (apt install g++) or name it in CXX"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        return f"no {header}: install Python's headers (apt install python3-dev)"
    return None
