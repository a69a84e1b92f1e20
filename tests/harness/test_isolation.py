"""Whatever ends a job's process, the job has a typed status, a log and an error that says what happened."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness import isolation
from harness.compose import compose
from harness.isolation import run_child, run_isolated
from harness.record import JobRecord, Status

RECORDING = "from harness.record import JobRecord; import os, sys, signal, time; record = JobRecord('.'); "


def run_script(script: str, job_dir: Path, timeout_s: float | None = None) -> Status:
    code = f"import os; os.chdir({str(job_dir)!r}); {script}"
    return run_child([sys.executable, "-c", code], job_dir, timeout_s)


def result_of(job_dir: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((job_dir / "result.json").read_text())
    return result


def test_a_job_that_records_its_end_keeps_it(tmp_path: Path) -> None:
    assert run_script(RECORDING + "record.update(status='parity_failed')", tmp_path) is Status.PARITY_FAILED


def test_a_status_outlives_a_crash_after_it(tmp_path: Path) -> None:
    assert run_script(RECORDING + "record.update(status='ok'); os._exit(3)", tmp_path) is Status.OK


def test_a_process_that_is_killed_leaves_the_signal(tmp_path: Path) -> None:
    assert run_script(RECORDING + "os.kill(os.getpid(), signal.SIGKILL)", tmp_path) is Status.KILLED
    assert result_of(tmp_path)["error"]["kind"] == "SIGKILL"


def test_a_segmentation_fault_is_a_kill_by_that_signal(tmp_path: Path) -> None:
    assert run_script("import ctypes; ctypes.string_at(0)", tmp_path) is Status.KILLED
    assert result_of(tmp_path)["error"]["kind"] == "SIGSEGV"


def test_a_process_that_dies_hard_is_failed_with_its_code(tmp_path: Path) -> None:
    assert run_script(RECORDING + "print('last words', flush=True); os._exit(7)", tmp_path) is Status.FAILED
    error = result_of(tmp_path)["error"]
    assert "code 7" in error["message"]
    assert "last words" in error["traceback"]


def test_an_exception_before_the_record_is_in_the_log_and_the_row(tmp_path: Path) -> None:
    assert run_script("raise RuntimeError('no such device')", tmp_path) is Status.FAILED
    assert "RuntimeError: no such device" in result_of(tmp_path)["error"]["traceback"]
    assert "RuntimeError: no such device" in (tmp_path / "job.log").read_text()


def test_a_process_that_hangs_is_ended_with_all_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "_GRACE_S", 0.0)
    script = RECORDING + "import subprocess; subprocess.Popen(['sleep', '600']); time.sleep(600)"
    assert run_script(script, tmp_path, timeout_s=1.0) is Status.TIMEOUT
    assert "job.timeout_s=1" in result_of(tmp_path)["error"]["message"]


def test_an_interrupt_reaches_the_child_and_is_recorded(tmp_path: Path) -> None:
    script = RECORDING + "os.kill(os.getppid(), signal.SIGINT); time.sleep(600)"
    with pytest.raises(KeyboardInterrupt):
        run_script(script, tmp_path)
    assert result_of(tmp_path)["status"] == Status.INTERRUPTED


def test_rows_that_a_killed_job_wrote_become_its_files(tmp_path: Path) -> None:
    script = RECORDING + "record.append('capture', {'capture_size': 4}); os.kill(os.getpid(), signal.SIGKILL)"
    assert run_script(script, tmp_path) is Status.KILLED
    assert (tmp_path / "capture.csv").read_text().splitlines()[1].startswith("4,")


def test_a_real_job_runs_in_its_own_process(tmp_path: Path) -> None:
    shortened = ["experiment=quick", "measure=none", "workload=none", "tracking=disabled", "device=cpu"]
    (tmp_path / "config.yaml").write_text(compose(shortened))
    assert run_isolated(tmp_path) is Status.OK, (tmp_path / "job.log").read_text()
    assert (tmp_path / "capture.csv").exists()


def test_a_record_that_was_already_final_is_left_alone(tmp_path: Path) -> None:
    JobRecord(tmp_path).update(status=Status.OK)
    assert isolation.conclude(tmp_path, Status.KILLED, "SIGTERM") is Status.OK


def test_what_a_killed_process_recorded_is_published_by_another(tmp_path: Path) -> None:
    start = "record.update(config={'tracking': {'mode': 'offline'}}); record.append('prefill', {'num_tokens': 16}); "
    assert run_script(RECORDING + start + "os.kill(os.getpid(), signal.SIGKILL)", tmp_path) is Status.KILLED
    wandb = result_of(tmp_path)["wandb"]
    assert (wandb["status"], wandb["reason"]) == ("ok", None)
    assert Path(wandb["dir"]).is_absolute()
    assert (tmp_path / "prefill.csv").exists()


def test_children_of_other_threads_are_interrupted_and_say_so(tmp_path: Path) -> None:
    job_dirs = [tmp_path / name for name in ("winds_down", "dies_of_it")]
    endings = ["record.update(status='interrupted', error={'message': 'wound down'})", "os._exit(1)"]
    scripts = [
        f"{RECORDING}\ntry: open('begun', 'w').close(); time.sleep(600)\nexcept KeyboardInterrupt: {ending}"
        for ending in endings
    ]
    for job_dir in job_dirs:
        job_dir.mkdir()
    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(run_script, script, job_dir)
            for script, job_dir in zip(scripts, job_dirs, strict=True)
        ]
        while not all((job_dir / "begun").exists() for job_dir in job_dirs):
            time.sleep(0.01)
        isolation.interrupt_running()
        assert [end.result() for end in ends] == [Status.INTERRUPTED, Status.INTERRUPTED]
    assert result_of(job_dirs[0])["error"]["message"] == "wound down"
    assert result_of(job_dirs[1])["error"]["message"] == "interrupted"
