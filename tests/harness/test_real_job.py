"""A real job in a process of its own: how it exits, what an interrupt leaves, and what a kill leaves."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.record import STREAMS
from harness.record_reader import read_result, read_stream
from tests.harness.tiny import tiny_yaml

ROOT = str(Path(__file__).parents[2])
SHORT = {"model.max_seq_len": 64, "measure.batch_sizes": [2], "workload.max_requests": 2}
QUICK = ("experiment=quick", "model.config.num_hidden_layers=1", "tracking=disabled", "output_dir=job")


def _start(folder: Path, *overrides: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "harness", *QUICK, *overrides],
        env={"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def test_a_job_whose_output_nobody_reads_ends_ok_with_0(tmp_path: Path) -> None:
    job = _start(tmp_path, "measure=none", "workload.max_requests=2")
    assert job.stdout is not None and job.stderr is not None
    job.stdout.close()
    job.stderr.close()
    assert job.wait() == 0
    assert read_result(tmp_path / "job")["status"] == "ok"


def _ignore_interrupts() -> None:
    """As a shell does that runs a script, for a command with `&`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def test_an_interrupted_job_in_the_background_ends_with_130_and_its_rows(tmp_path: Path) -> None:
    endless = ("measure.min_samples=1000000", "measure.timeout_s=1000")
    job = _start(tmp_path, *endless, preexec_fn=_ignore_interrupts)
    assert job.stderr is not None
    for line in job.stderr:
        if line.startswith("size sweep"):
            break
    job.send_signal(signal.SIGINT)
    job.send_signal(signal.SIGINT)
    _, printed = job.communicate()
    assert job.returncode == 130, printed
    result = read_result(tmp_path / "job")
    assert (result["status"], result["error"]["kind"]) == ("interrupted", "KeyboardInterrupt")
    assert len(read_stream(tmp_path / "job", "capture")) > 0


#: Runs jobs in forks of one process, and kills each at its Nth write. One thread: a fork would lose others.
_KILL_AT_WRITES = """
import gc, os, signal, sys
import harness.experiment, harness.parity, harness.size_sweep, harness.workload_replay, runners.model_runner
import pandas, pyarrow.csv, pyarrow.json, pyarrow.parquet, transformers.models.qwen3.modeling_qwen3
from harness import durable, record
from harness.progress import Progress

def kill_at(number):
    writes = 0
    def counted(original):
        def write(*args):
            nonlocal writes
            writes += 1
            if writes == number:
                half = getattr(args[0], "_file", None)
                if half is not None:  # a row that is only half there
                    half.write(b'{"batch_size": 2, "padd')
                    half.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args)
        return write
    durable.LineFile.append = counted(durable.LineFile.append)
    record.replace_file = counted(record.replace_file)

gc.freeze()  # or each job's collections walk all that was imported
for number in map(int, sys.argv[2:]):
    child = os.fork()
    if child == 0:
        kill_at(number)
        harness.experiment.run_job(sys.argv[1], f"job{number}", Progress(quiet=True))
        os._exit(0)
    print(os.waitpid(child, 0)[1])
"""


def test_a_kill_at_any_write_of_a_job_leaves_every_finished_row_readable(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(tiny_yaml(SHORT))
    writes = sorted(random.Random(20).sample(range(2, 40), 8))
    ran = subprocess.run(
        [sys.executable, "-c", _KILL_AT_WRITES, "config.yaml", *map(str, writes)],
        env={"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    ends = [int(line) for line in ran.stdout.split()]
    num_rows = []
    for number, end in zip(writes, ends, strict=True):
        folder = tmp_path / f"job{number}"
        frames = {name: read_stream(folder, name) for name in STREAMS}
        # How many samples a point takes depends on their noise, so they are counted in no order.
        num_rows.append(sum(len(frame) for name, frame in frames.items() if name != "samples"))
        if end == signal.SIGKILL:
            assert read_result(folder)["status"] in ("running", "ok")
        for name, frame in frames.items():
            first = next(iter(STREAMS[name].columns))
            assert frame[first].notna().all(), name
    assert ends.count(signal.SIGKILL) >= 6
    assert num_rows == sorted(num_rows), "a later kill leaves no fewer rows"


def test_a_job_that_runs_out_of_time_ends_with_1(tmp_path: Path) -> None:
    job = _start(tmp_path, "job.timeout_s=0.001")
    _, printed = job.communicate()
    assert job.returncode == 1
    assert "timeout: JobTimeoutError" in printed
