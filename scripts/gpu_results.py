#!/usr/bin/env python3
"""Run the GPU tests and the committed measurements, each stage on its own, within a time limit.

    gpu_results.py OUT [--seconds 470] [--only STAGE ...] [--trace azure.csv]

Stages, in order: `environment`, `tests`, the benchmarks `host_prepare`, `host_prepare_fused` and `kernels`, then one job each
(`--list` names them). A stage that fails, hangs or finds no time left costs the others nothing. OUT
receives environment.json, tests.json, a JSON file a benchmark, summary.json with the table that is
printed last, and a folder a job with its record. Calls with different stages may share OUT: what is
there already is kept and counted in the table.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gpu_jobs import JOBS, ON_REQUEST
from gpu_summary import read_json, summarise, today, write_json

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

KEPT_FILES = (
    "result.json",
    "capture.csv",
    "sizes.csv",
    "prefill.csv",
    "ragged.csv",
    "loop.csv",
    "profile.csv",
    "bench_serve.json",
)
KEPT_TABLES = ("steps.parquet", "requests.parquet", "samples.parquet")
LARGEST_TABLE_BYTES = 2**20
#: Stage → module and arguments of a benchmark that prints JSON lines.
BENCHMARKS: dict[str, tuple[str, ...]] = {
    "host_prepare": ("tests.bench.bench_host_prepare",),
    "host_prepare_fused": ("tests.bench.bench_host_prepare", "fused"),
    "kernels": ("tests.bench.bench_decode_kernels", "model=qwen3_0_6b", "model.max_seq_len=1024"),
}
#: The GPU tests, what the others rest on first; files that are not named come last.
TEST_ORDER = (
    *("test_cuda_graphs", "test_flashinfer_runner", "test_flashinfer_backend", "test_memory"),
    *("test_pool_sizing", "test_torch_backend", "test_fused", "test_timing", "test_compilation"),
)
GPU_TESTS = sorted(
    (f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")),
    key=lambda name: [*(f"tests/gpu/{stem}.py" for stem in TEST_ORDER), name].index(name),
)
#: Stages before the jobs.
CHECKS = ("environment", "tests", *BENCHMARKS)
BENCHMARK_SECONDS = 60.0
#: Imported once for all jobs, before they are started.
PRELOADED = ["torch", "transformers", "pandas", "pyarrow.parquet", "harness.experiment", "harness.compose"]
#: Seconds that a stage needs to make sense, and that a job has to close its record after the limit.
LEAST_SECONDS, CLOSING_SECONDS = 15.0, 8.0


def main() -> int:
    options = parse_arguments()
    if options.list:
        print("\n".join([*CHECKS, *JOBS]))
        return 0
    if (device := other_device(options.out)) is not None:
        print(f"{options.out} holds what was measured on {device}: give another folder", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    # The job processes and pytest find the checkout whatever the working folder.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    deadline = time.monotonic() + options.seconds
    outcomes = {}
    for stage in stages(options):
        started = time.monotonic()
        outcomes[stage] = run_stage(stage, options, deadline)
        print(f"[{time.monotonic() - started:6.1f} s] {stage}: {outcomes[stage]}", flush=True)
    summarise(options.out, outcomes, JOBS)
    return 0 if all(outcome.startswith(("ok", "skipped")) for outcome in outcomes.values()) else 1


def other_device(out: Path) -> str | None:
    """Return the device of a record in `out` that no GPU of this machine is; None if there is no such record."""
    from harness.nvidia import visible_gpus

    here = {gpu.name for gpu in visible_gpus()}
    if not here and Path("/dev/nvidiactl").exists():
        return None  # a GPU whose name cannot be asked here
    for path in (out / "environment.json", out / "result.json", *sorted(out.glob("*/result.json"))):
        content = read_json(path) or {}
        device = (content.get("environment") or content).get("device_name")
        if device and device not in here:
            return str(device)
    return None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?", default=Path("docs/results"), help="the folder to fill")
    parser.add_argument("--seconds", type=float, default=470.0, help="for all stages together")
    parser.add_argument("--only", nargs="+", choices=[*CHECKS, *JOBS], help="these stages")
    parser.add_argument("--trace", type=Path, help="a log in the Azure format, for the stages *_trace")
    parser.add_argument("--tests", nargs="+", default=GPU_TESTS, help="what pytest runs")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of every job")
    parser.add_argument("--list", action="store_true", help="name the stages")
    return parser.parse_args()


def stages(options: argparse.Namespace) -> list[str]:
    """Return the stages asked for; all that can run, if nothing is said."""
    if options.only:
        return list(options.only)
    jobs = [name for name in JOBS if name not in ON_REQUEST]
    return [*CHECKS, *(name for name in jobs if options.trace or "workload=trace" not in JOBS[name])]


def run_stage(stage: str, options: argparse.Namespace, deadline: float) -> str:
    """Run one stage and say in a line how it ended."""
    seconds = deadline - time.monotonic()
    if seconds < LEAST_SECONDS:
        return f"skipped: {seconds:.0f} s are left"
    try:
        if stage == "environment":
            return describe(options.out)
        if stage == "tests":
            return run_tests(options.out, options.tests, seconds)
        if stage in BENCHMARKS:
            return run_benchmark(stage, options.out, min(seconds, BENCHMARK_SECONDS))
        return measure(stage, options, seconds)
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"


# --- environment and tests ---------------------------------------------------------------------


def describe(out: Path) -> str:
    """Write environment.json. In a process of its own: this one never touches the device."""
    program = (
        "import json, torch; from harness.device import describe_environment, resolve_device;"
        "print(json.dumps(describe_environment(resolve_device('auto'))))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    if run.returncode:
        return f"failed: {run.stderr.strip()[-300:]}"
    environment = json.loads(run.stdout.splitlines()[-1])
    environment["command"] = ["python", "scripts/gpu_results.py", *sys.argv[1:]]
    write_json(out / "environment.json", {"date": today(), **environment})
    return f"ok: {environment['device_name'] or 'no GPU'}"


def run_tests(out: Path, paths: Sequence[str], seconds: float) -> str:
    """Run pytest and write tests.json: counts, and each test that failed or was skipped, with why.

    Tests that are cut short by the time limit are counted as far as they came.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--durations=15",
            f"--junitxml={report}",
            *paths,
        ]
        started = time.monotonic()
        was_cut_short = not run_within([sys.executable, *command], seconds - 2 * CLOSING_SECONDS)
        if not report.exists():
            return "failed: pytest left no report"
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    results = [(f"{case.get('classname')}::{case.get('name')}", *verdict(case)) for case in cases]
    counts = Counter(kind for _, kind, _ in results)
    write_json(
        out / "tests.json",
        {
            "date": today(),
            "command": ["python", "-m", "pytest", *paths],
            "seconds": round(time.monotonic() - started, 1),
            "was_cut_short": was_cut_short,
            **{kind: counts[kind] for kind in ("passed", "failed", "skipped")},
            "not_passed": [
                {"test": name, "outcome": kind, "reason": reason}
                for name, kind, reason in results
                if kind != "passed"
            ],
        },
    )
    line = ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped"))
    if was_cut_short:
        return f"failed: no time was left after {line}"
    return f"failed: {line}" if counts["failed"] or not counts["passed"] else f"ok: {line}"


def run_within(command: Sequence[str], seconds: float) -> bool:
    """Run a command; interrupt it after `seconds`, so that it can close its report. False if that was needed."""
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        process.wait(seconds)
        return True
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(CLOSING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return False


def run_benchmark(stage: str, out: Path, seconds: float) -> str:
    """Run a benchmark and write the JSON lines that it prints to a file of the stage's name."""
    command = ["-m", *BENCHMARKS[stage]]
    run = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
    )
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    write_json(out / f"{stage}.json", {"date": today(), "command": ["python", *command], "results": lines})
    return f"ok: {len(lines)} lines" if run.returncode == 0 else f"failed: {run.stderr.strip()[-300:]}"


def verdict(case: ElementTree.Element) -> tuple[str, str]:
    """Return how a test of the JUnit report ended, and why."""
    for tag, kind in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(tag)
        if found is not None:
            return kind, (found.get("message") or "")[:500]
    return "passed", ""


# --- jobs --------------------------------------------------------------------------------------


def measure(stage: str, options: argparse.Namespace, seconds: float) -> str:
    """Run the stage's job in a process of its own; keep its record, whatever happened."""
    overrides = [*JOBS[stage], *options.set, f"job.timeout_s={max(seconds - CLOSING_SECONDS, 1):.0f}"]
    if "workload=trace" in overrides:
        if options.trace is None:
            return "skipped: no --trace was given"
        overrides.append(f"workload.path={options.trace.resolve()}")
    with tempfile.TemporaryDirectory() as folder:
        job_dir = Path(folder) / stage
        # One server imports torch and the rest once, and a fresh process for each job comes from it.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        process = context.Process(target=run_one_job, args=(overrides, str(job_dir)))
        process.start()
        process.join(seconds)
        end(process)
        keep(job_dir, options.out / stage)
    return job_outcome(options.out / stage)


def run_one_job(overrides: list[str], job_dir: str) -> None:
    """Compose and run a job; its record says how it ended."""
    from harness.compose import compose
    from harness.errors import ConfigError
    from harness.experiment import run_job
    from harness.progress import Progress

    try:
        run_job(compose(overrides), job_dir, Progress(quiet=True))
    except ConfigError as error:  # an override that cannot be read: there is no record yet
        Path(job_dir).mkdir(parents=True, exist_ok=True)
        refusal = {"status": "invalid_config", "error": {"kind": "ConfigError", "message": str(error)}}
        write_json(Path(job_dir) / "result.json", refusal)


def end(process: Any) -> None:
    """End a job that is over its time: asked first, so that it can close its record."""
    if process.is_alive():
        os.kill(process.pid, signal.SIGTERM)
        process.join(CLOSING_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()


def keep(job_dir: Path, target: Path) -> None:
    """Copy a job's record, less what is large."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in (*KEPT_FILES, *KEPT_TABLES):
        source = job_dir / name
        if source.exists() and (name in KEPT_FILES or source.stat().st_size <= LARGEST_TABLE_BYTES):
            shutil.copy(source, target / name)


def job_outcome(folder: Path) -> str:
    result = read_json(folder / "result.json")
    if result is None:
        return "failed: no result.json"
    message = ((result.get("error") or {}).get("message") or "").strip().replace("\n", " ")
    if result["status"] == "invalid_config":
        return f"skipped: {message[:300]}"
    return f"{result['status']}{': ' if message else ''}{message[:300]}"


if __name__ == "__main__":
    sys.exit(main())
