"""A job forked by the server is a process like any other: its log, its environment, its end, and the end of its parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import forked_job
from harness.forked_job import ForkedJob, ServerHandle, ServerLostError, start_forked
from harness.isolation import child_environment, run_isolated, supervise
from harness.memory_guard import held_bytes, process_tree
from harness.record import Status
from harness.record_reader import read_result

FAULTS = Path(__file__).parents[1] / "faults"


def environment(**variables: str) -> dict[str, str]:
    """Of a job that runs its folder's `script.py` in the place of an experiment."""
    inherited = child_environment()
    path = f"{FAULTS}{os.pathsep}{inherited['PYTHONPATH']}"
    return inherited | {"PYTHONPATH": path, "HARNESS_TEST_LIGHT": "1"} | variables


@pytest.fixture(scope="module")
def server() -> Iterator[ServerHandle]:
    handle = ServerHandle(environment())
    yield handle
    handle.close()


def start(server: ServerHandle, job_dir: Path, script: str, **variables: str) -> ForkedJob:
    (job_dir / "script.py").write_text(script)
    return server.start(job_dir, environment(**variables))


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("os._exit(7)", 7),
        ("raise RuntimeError('no such device')", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ],
)
def test_the_end_of_a_job_is_told_as_it_was(
    server: ServerHandle, tmp_path: Path, script: str, code: int
) -> None:
    assert start(server, tmp_path, script).wait(60) == code


def test_what_a_job_prints_is_in_its_log(server: ServerHandle, tmp_path: Path) -> None:
    script = "print('out'); os.system('echo from a child'); raise RuntimeError('no such device')"
    start(server, tmp_path, script).wait(60)
    log = (tmp_path / "job.log").read_text()
    assert "out\nfrom a child\n" in log
    assert "RuntimeError: no such device" in log


def test_a_job_has_torch_its_own_variables_and_a_group_of_its_own(
    server: ServerHandle, tmp_path: Path
) -> None:
    script = (
        "import json; found = ['torch' in sys.modules, os.environ['CUDA_VISIBLE_DEVICES'], os.getpgrp() == os.getpid(), "
        "signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, os.getcwd(), sys.modules['torch'].cuda.is_initialized()]; "
        "open(sys.argv[1] + '/found', 'w').write(json.dumps(found))"
    )
    start(server, tmp_path, script, CUDA_VISIBLE_DEVICES="GPU-7").wait(60)
    assert json.loads((tmp_path / "found").read_text()) == [True, "GPU-7", True, True, os.getcwd(), False]


def test_a_job_that_is_let_go_is_killed(server: ServerHandle, tmp_path: Path) -> None:
    job = start(server, tmp_path, "time.sleep(600)")
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(0.01)
    os.killpg(job.pid, signal.SIGKILL)
    assert job.wait(60) == -signal.SIGKILL


def test_a_job_over_its_memory_is_killed_with_a_kind_of_its_own(server: ServerHandle, tmp_path: Path) -> None:
    job = start(server, tmp_path, "held = b'x' * (700 << 20); time.sleep(600)")
    assert supervise(job, tmp_path, 60.0, max_memory_mib=600) is Status.KILLED
    error = read_result(tmp_path)["error"]
    assert error["kind"] == "MemoryGuard"
    assert "MiB of host memory, over job.max_memory_mib=600" in error["message"]


def test_the_memory_of_a_job_is_that_of_its_children_too(server: ServerHandle, tmp_path: Path) -> None:
    script = (
        "import subprocess; subprocess.run([sys.executable, '-c', "
        "\"held = b'x' * (200 << 20); open('%s/ready', 'w').close(); import time; time.sleep(600)\" % sys.argv[1]])"
    )
    job = start(server, tmp_path, script)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    alone = held_bytes(next(process_tree(job.pid))) - sum(map(held_bytes, list(process_tree(job.pid))[1:]))
    assert held_bytes(job.pid) - alone >= 200 << 20
    os.killpg(job.pid, signal.SIGKILL)
    job.wait(60)


def test_a_server_that_dies_takes_its_jobs_along_and_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked_job, "_server", None)
    (tmp_path / "script.py").write_text("time.sleep(600)")
    job = start_forked(tmp_path, environment())
    first = forked_job._server
    assert first is not None
    first._process.kill()
    assert supervise(job, tmp_path, None, None) is Status.KILLED
    assert read_result(tmp_path)["error"]["kind"] == "SIGKILL"
    (tmp_path / "script.py").write_text("pass")
    assert start_forked(tmp_path, environment()).wait(60) == 0
    assert forked_job._server is not first
    assert forked_job._server is not None
    forked_job._server.close()


def test_without_a_server_a_job_starts_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise ServerLostError("none here")

    monkeypatch.setattr("harness.isolation.start_forked", refuse)
    (tmp_path / "script.py").write_text("sys.exit(3)")
    assert run_isolated(tmp_path, environment=environment()) is Status.FAILED
    assert "code 3" in read_result(tmp_path)["error"]["message"]
    assert "started without the fork server: none here" in (tmp_path / "job.log").read_text()


def test_the_process_of_a_sweep_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("sys.exit(3)")
    script = (
        "import sys; from pathlib import Path; from harness.isolation import run_isolated; "
        f"run_isolated(Path({str(tmp_path)!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], env=environment(), check=False).returncode == 0
    assert "code 3" in read_result(tmp_path)["error"]["message"]
    assert "without the fork server" not in (tmp_path / "job.log").read_text()


#: Before a sweep's process runs a job: nothing, or what leaves it without a fork server.
STARTS = {
    "forked": "",
    "by itself": (
        "from harness import isolation\n"
        "def refuse(*arguments): raise isolation.ServerLostError('none here')\n"
        "isolation.start_forked = refuse\n"
    ),
}


@pytest.mark.parametrize("start", STARTS)
def test_a_sweep_that_is_killed_leaves_no_job_behind(tmp_path: Path, start: str) -> None:
    (tmp_path / "script.py").write_text(
        "open(sys.argv[1] + '/pid', 'w').write(str(os.getpid())); time.sleep(600)"
    )
    script = (
        f"{STARTS[start]}from pathlib import Path; from harness.isolation import run_isolated; "
        f"run_isolated(Path({str(tmp_path)!r}))"
    )
    sweep = subprocess.Popen([sys.executable, "-c", script], env=environment(), start_new_session=True)
    pid = tmp_path / "pid"
    while not (pid.exists() and pid.read_text()):
        assert sweep.poll() is None
        time.sleep(0.01)
    os.kill(sweep.pid, signal.SIGKILL)
    sweep.wait()
    while runs(int(pid.read_text())):
        time.sleep(0.01)


def test_a_job_whose_parent_died_before_it_began_ends_at_once() -> None:
    script = "import os; from harness.parent_death import end_with_parent; end_with_parent(os.getpid()); print('lives')"
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, b"")


def runs(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody asked about does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
