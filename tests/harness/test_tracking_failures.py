"""Whatever W&B does, the result stays."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.record_reader import read_result
from harness.tracking import publish
from tests.harness.job_folder import (
    with_tracking,
    write_job,
)
from tests.harness.small_disk import small_disk
from tests.harness.wandb_server import server

ROOT = Path(__file__).parents[2]
#: A limit on a test that hangs; what a test states must not hang on how fast the machine is.
PATIENCE_S = 600
PUBLISH = """
import sys
from harness import tracking
print(tracking.publish(sys.argv[1], timeout_s=600)["status"])
"""


def run_python(
    code: str, job_dir: Path, *arguments: str, wrap: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run `code` with a service of W&B's of its own, not one that a test of this process has left running."""
    command = [*wrap, sys.executable, "-c", code, str(job_dir), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    environment |= {"WANDB__SERVICE_WAIT": str(PATIENCE_S)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )


class TestAFailureOfWandb:
    """Each leaves the job ok, its files whole, and the reason in the record."""

    def published_anyway(self, job_dir: Path, reason: str, **options: Any) -> None:
        files = {
            path.name: path.read_bytes() for path in job_dir.iterdir() if path.suffix in (".csv", ".parquet")
        }
        outcome = publish(job_dir, **options)
        result = read_result(job_dir)
        assert result["wandb"] == outcome
        assert (result["status"], outcome["status"], outcome["dir"]) == ("ok", "failed", None)
        assert reason in outcome["reason"]
        assert files == {name: (job_dir / name).read_bytes() for name in files}

    def test_a_folder_without_rights(self, tmp_path: Path) -> None:
        write_job(tmp_path, config=with_tracking(dir="/proc/no-such-place/wandb"))
        self.published_anyway(tmp_path, "cannot write to /proc/no-such-place/wandb")

    def test_a_folder_that_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        write_job(tmp_path, config=with_tracking(dir=str(tmp_path / "file" / "wandb")))
        self.published_anyway(tmp_path, "set tracking.dir to another folder")

    def test_init_raises(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import wandb

        def raising(**options: Any) -> None:
            raise wandb.errors.CommError("the server is down")

        monkeypatch.setattr(wandb, "init", raising)
        write_job(tmp_path)
        self.published_anyway(tmp_path, "CommError: the server is down")

    def test_init_exits(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import wandb

        monkeypatch.setattr(wandb, "init", lambda **options: sys.exit(3))
        write_job(tmp_path)
        self.published_anyway(tmp_path, "SystemExit: 3")

    def test_init_never_returns(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import wandb

        released = threading.Event()
        monkeypatch.setattr(wandb, "init", lambda **options: released.wait(60))
        write_job(tmp_path)
        self.published_anyway(tmp_path, "W&B did not finish within 0.2 s", timeout_s=0.2)
        released.set()

    def test_no_key_for_online(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("WANDB_API_KEY", raising=False)
        monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
        write_job(tmp_path, config=with_tracking(mode="online"))
        self.published_anyway(tmp_path, "no W&B key on this machine; run `wandb login`")

    def test_a_bad_key(self, tmp_path: Path) -> None:
        """In a process of its own: W&B keeps the key and the server for the rest of a process."""
        write_job(tmp_path, config=with_tracking(mode="online"))
        code = """
import os, sys
os.environ |= {"WANDB_API_KEY": "bad", "WANDB_BASE_URL": "http://127.0.0.1:9", "HOME": sys.argv[1]}
from harness import tracking
print(tracking.publish(sys.argv[1], timeout_s=600)["status"])
"""
        done = run_python(code, tmp_path)
        assert (done.returncode, done.stdout) == (0, "failed\n"), done.stderr
        result = read_result(tmp_path)
        assert result["status"] == "ok" and "WANDB_API_KEY" in result["wandb"]["reason"]

    @pytest.mark.parametrize(("behaviour", "timeout_s"), [("refuses", 600), ("hangs", 4), ("401", 600)])
    def test_a_server_that(self, behaviour: str, timeout_s: int, tmp_path: Path) -> None:
        """The real client, with a key of the right form, against a socket of this machine.

        Only where nobody answers does the time decide; where nobody listens, the client gives up after two trials.
        """
        write_job(tmp_path, config=with_tracking(mode="online"))
        code = """
import os, sys
key = "0123456789abcdef" * 2 + "01234567"
os.environ |= {"WANDB_API_KEY": key, "WANDB_BASE_URL": sys.argv[2], "HOME": sys.argv[1]}
os.environ["WANDB_ERROR_REPORTING"] = "false"  # W&B would wait 10 s at exit for where its own errors go
os.environ |= {"WANDB__GRAPHQL_RETRY_MAX": "1", "WANDB__GRAPHQL_RETRY_WAIT_MIN_SECONDS": "0.1"}
from harness import tracking
tracking._INIT_S = 600
print(tracking.publish(sys.argv[1], timeout_s=int(sys.argv[3]))["status"])
"""
        with server(behaviour) as address:
            done = run_python(code, tmp_path, address, str(timeout_s))
        assert (done.returncode, done.stdout) == (0, "failed\n"), done.stderr
        result = read_result(tmp_path)
        assert (result["status"], result["wandb"]["status"]) == ("ok", "failed")
        expected = {
            "refuses": "connection refused",
            "hangs": "deadline exceeded|not finish",
            "401": "permission denied",
        }
        assert re.search(expected[behaviour], result["wandb"]["reason"]), result["wandb"]["reason"]
        assert "0123456789abcdef" not in (tmp_path / "result.json").read_text()

    def test_a_folder_that_this_user_may_not_write_to(self, tmp_path: Path) -> None:
        """Root may write anywhere, unless it gives that right up for the process."""
        folder = tmp_path / "closed"
        folder.mkdir(mode=0o500)
        write_job(tmp_path / "job", config=with_tracking(dir=str(folder)))
        wrap = [] if os.geteuid() else ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
        if wrap and subprocess.run([*wrap, "true"], capture_output=True, check=False).returncode:
            pytest.skip("root cannot give its rights up here")
        done = run_python(PUBLISH, tmp_path / "job", wrap=wrap)
        assert (done.returncode, done.stdout) == (0, "failed\n"), done.stderr
        result = read_result(tmp_path / "job")
        assert result["status"] == "ok"
        assert f"cannot write to {folder}: Permission denied" in result["wandb"]["reason"]

    @pytest.mark.parametrize(("size_mib", "reason"), [(1, "disk full"), (20, "No space left on device")])
    def test_a_disk_that_is_really_full(self, size_mib: int, reason: str, tmp_path: Path) -> None:
        """A disk of its own, in memory: too small from the start, or filled by another one midway."""
        disk = tmp_path / "disk"
        wrap = small_disk(disk, size_mib)
        write_job(tmp_path / "job", config=with_tracking(dir=str(disk)))
        code = """
import contextlib, sys
from harness import tracking, tracking_content
write_content = tracking_content.write_content
def fill_and_write(run, job_dir, result):
    with contextlib.suppress(OSError), open(sys.argv[2] + "/other", "wb", buffering=0) as other:
        while other.write(bytes(4096)):
            pass
    write_content(run, job_dir, result)
tracking_content.write_content = fill_and_write
tracking._FLUSH_S = 0.5
print(tracking.publish(sys.argv[1], timeout_s=600)["status"])
"""
        done = run_python(code, tmp_path / "job", str(disk), wrap=wrap)
        assert (done.returncode, done.stdout) == (0, "failed\n"), done.stderr
        result = read_result(tmp_path / "job")
        assert (result["status"], result["wandb"]["status"]) == ("ok", "failed")
        assert reason in result["wandb"]["reason"]

    def test_a_disk_that_is_nearly_full(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1024})())
        write_job(tmp_path)
        self.published_anyway(tmp_path, "disk full")

    @pytest.mark.parametrize("max_file_bytes", [20_000, 100])
    def test_a_disk_that_fills_up_while_wandb_writes(self, tmp_path: Path, max_file_bytes: int) -> None:
        """W&B itself reports nothing (0.31): the run's file simply ends early.

        With the smaller limit not even the outcome can be noted, and the record stays as it was.
        """
        write_job(tmp_path, num_steps=400)
        code = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({max_file_bytes}, {max_file_bytes}))
from harness import tracking
tracking._FLUSH_S = 0.5
outcome = tracking.publish(sys.argv[1], timeout_s=600)
print(outcome["status"], outcome["reason"])
"""
        done = run_python(code, tmp_path)
        reason = "cannot note it" if max_file_bytes == 100 else "W&B wrote only a part of the run"
        assert (done.returncode, done.stdout[: 7 + len(reason)]) == (0, f"failed {reason}"), done.stderr
        result = read_result(tmp_path)
        assert result["status"] == "ok"
        assert (result["wandb"] or {}).get("status") == (None if max_file_bytes == 100 else "failed")

    def test_a_service_that_hangs_costs_only_this_run(self, tmp_path: Path) -> None:
        """Neither the process's end nor its next job waits for it."""
        write_job(tmp_path / "hung")
        write_job(tmp_path / "next")
        code = """
import contextlib, os, signal, sys, threading
from pathlib import Path
from harness import tracking, tracking_content

write_content, within = tracking_content.write_content, tracking._within
tracking._TEARDOWN_S = tracking._INIT_S = tracking._FLUSH_S = 600
is_stopped = threading.Event()

def hang(run, job_dir, result):
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            os.kill(int(pid), signal.SIGSTOP)
    is_stopped.set()
    run.finish()

def within_from_the_stop_on(limit_s, work):
    def run():
        with contextlib.suppress(BaseException):
            work()
        is_stopped.set()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    is_stopped.wait()
    return within(limit_s, thread.join)

tracking_content.write_content, tracking._within = hang, within_from_the_stop_on
tracking.publish(Path(sys.argv[1]) / "hung", timeout_s=2)
tracking_content.write_content, tracking._within = write_content, within
tracking.publish(Path(sys.argv[1]) / "next", timeout_s=600)
"""
        done = run_python(code, tmp_path)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        hung, following = read_result(tmp_path / "hung"), read_result(tmp_path / "next")
        assert (hung["status"], hung["wandb"]["status"]) == ("ok", "failed")
        assert "did not finish within 2 s" in hung["wandb"]["reason"]
        assert following["wandb"]["status"] == "ok", following["wandb"]["reason"]
