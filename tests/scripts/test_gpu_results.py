"""The script of the committed measurements."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/gpu_results.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_what_another_gpu_measured_is_not_overwritten(tmp_path: Path) -> None:
    """The README names this command beside its table; who types it on a laptop loses no record."""
    record = tmp_path / "qwen3_0_6b/result.json"
    record.parent.mkdir()
    content = json.dumps({"status": "ok", "environment": {"device_name": "NVIDIA of another machine"}})
    record.write_text(content)
    done = run(str(tmp_path))
    if "give another folder" not in done.stderr:
        assert Path("/dev/nvidiactl").exists(), done.stderr
        return
    assert done.returncode == 2 and "NVIDIA of another machine" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["qwen3_0_6b"]
    assert record.read_text() == content


def test_the_stages_can_be_listed() -> None:
    done = run("--list")
    assert done.returncode == 0 and {"environment", "tests", "tiny"} <= set(done.stdout.split())
