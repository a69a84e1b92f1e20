"""A disk of a few MiB, in memory, that one command sees."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


def small_disk(folder: Path, size_mib: int) -> list[str]:
    """Make `folder` and return the words before a command that mount a disk there; skips where nobody may."""
    folder.mkdir()
    mount = f'mount -t tmpfs -o size={size_mib}m none {folder} && exec "$@"'
    words = ["unshare", "--mount", "sh", "-c", mount, "-"]
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a disk, and not everywhere")
    return words
