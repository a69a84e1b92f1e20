#!/usr/bin/env python3
"""Run the GPU tests and the committed measurements, each stage on its own, within a time limit.

    gpu_results.py OUT [--seconds 470] [--only STAGE ...] [--trace azure.csv]

Stages, in order: `environment`, `tests`, the benchmarks `host_prepare` and `kernels`, then one job each
(`--list` names them). A stage that fails, hangs or finds no time left costs the others nothing. OUT
receives environment.json, tests.json, a JSON file a benchmark, summary.json with the table that is
printed last, and a folder a job with its record. Calls with different stages may share OUT: what is
there already is kept and counted in the table.
"""

from __future__ import annotations

import argparse
import csv
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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

#: The sizes of the tables: SGLang's capture list to 256, 512 tokens of context, few samples of slow steps.
TABLE = (
    *(
        "capture=sglang",
        "runner.max_batch_size=256",
        "model.max_seq_len=1024",
        "runner.prefill_chunk_tokens=4096",
    ),
    *("measure.context_lens=[512]", "measure.batch_sizes=[1,8,32,128,256]", "measure.prefill_tokens=[512]"),
    *("measure.timeout_s=0.8", "parity.batch_sizes=[1,7,32,100,256]", "workload=none", "tracking=disabled"),
)
#: A trace of long requests, over a pool that holds a part of them at full length.
TRACE = (
    *(
        "capture=sglang",
        "runner.max_batch_size=256",
        "model.max_seq_len=4096",
        "runner.prefill_chunk_tokens=2048",
    ),
    *(
        "attention.num_pages=24576",
        "attention.overcommit=true",
        "measure=none",
        "parity.batch_sizes=[1,7,64]",
    ),
    *("workload=trace", "workload.max_requests=500", "workload.rate_scale=10", "tracking=disabled"),
)
#: Costs for the planner: the sizes of every engine's list and some between, contexts up to long ones, uneven
#: batches, the scheduler's loop, and traffic to check the simulator against. One step is in flight, as simulated.
PLANNER_SIZES = [*range(1, 9), 10, 12, 14, 16, 20, 24, 28, *range(32, 257, 8)]
PLANNER = (
    *("model.implementation=fused", "compile=none", "capture=explicit", f"capture.sizes={PLANNER_SIZES}"),
    *("runner.max_batch_size=256", "model.max_seq_len=16384", "runner.prefill_chunk_tokens=2048"),
    *("attention.num_pages=36000", "attention.overcommit=true", "parity.batch_sizes=[1,7,32,100,256]"),
    *("measure=planning", f"measure.batch_sizes={PLANNER_SIZES}", "measure.eager_batch_sizes=[1,8,64]"),
    *("measure.longest_lens=[2048,16384]", "measure.prefill_tokens=[16,128,512,1024,2048]"),
    "measure.loop_batch_sizes=[1,8,32,64,128,256]",
    *("workload=trace", "workload.max_requests=500", "workload.rate_scale=10", "tracking=disabled"),
)
#: The same path in small, for a machine without a GPU: what it measures is emulated, and no source of costs.
PLANNER_TINY = (
    *("capture=explicit", "capture.sizes=[1,2,4,8,16]", "runner.max_batch_size=16", "model.max_seq_len=512"),
    *("runner.prefill_chunk_tokens=64", "parity.batch_sizes=[1,7,16]", "measure=planning"),
    *("measure.context_lens=[16,64,256]", "measure.longest_lens=[64,256]", "measure.prefill_tokens=[16,64]"),
    *("measure.eager_batch_sizes=[1,8]", "measure.loop_batch_sizes=[1,8,16]", "measure.timeout_s=0.1"),
    *("workload=trace", "workload.max_requests=20", "workload.rate_scale=10", "tracking=disabled"),
)
LAYER = ("compile=default", "compile.scope=layer", "compile.dynamic=true")
#: The fused layers with two steps in flight: `step_ms` is then the pace.
FUSED = ("model.implementation=fused", "runner.overlap=true")
#: What docs/measuring.md explains: a short sweep in three rounds, with all that the card tells.
TELEMETRY = (
    *("model=qwen3_0_6b", "compile=none", *TABLE),
    *("measure.batch_sizes=[1,8,32,128]", "measure.rounds=3", "measure.timeout_s=1.2"),
)
#: Stage → overrides of its job.
JOBS: dict[str, tuple[str, ...]] = {
    "tiny": ("model=tiny", "measure=quick", "workload.max_requests=4", "tracking=disabled"),
    "qwen3_0_6b": ("model=qwen3_0_6b", "compile=none", *TABLE),
    "qwen3_0_6b_compiled": ("model=qwen3_0_6b", *LAYER, *TABLE),
    "qwen3_8b": ("model=qwen3_8b", "compile=none", *TABLE),
    "qwen3_8b_compiled": ("model=qwen3_8b", *LAYER, *TABLE),
    "qwen3_0_6b_fused": ("model=qwen3_0_6b", "compile=none", *FUSED, *TABLE),
    "qwen3_8b_fused": ("model=qwen3_8b", "compile=none", *FUSED, *TABLE),
    "qwen3_0_6b_trace": ("model=qwen3_0_6b", *TRACE),
    "qwen3_8b_trace": ("model=qwen3_8b", *TRACE),
    "telemetry": (*TELEMETRY, "measure.profile=true"),
    "telemetry_again": TELEMETRY,
    "telemetry_flushed": (*TELEMETRY, "measure.flush_cache=true"),
    "planner_h200": ("model=qwen3_0_6b", *PLANNER, "measure.context_lens=[16,512,2048,8192,16384]"),
    "planner_h200_8b": ("model=qwen3_8b", *PLANNER, "measure.context_lens=[16,512,2048,8192]"),
    "planner_tiny": ("model=tiny", *PLANNER_TINY),
}
#: Run only if asked for by name: a first look at whether the script works, and a job that takes long.
ON_REQUEST = ("tiny", "planner_h200_8b", "planner_tiny")
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
    options.out.mkdir(parents=True, exist_ok=True)
    # The job processes and pytest find the checkout whatever the working folder.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    deadline = time.monotonic() + options.seconds
    outcomes = {}
    for stage in stages(options):
        started = time.monotonic()
        outcomes[stage] = run_stage(stage, options, deadline)
        print(f"[{time.monotonic() - started:6.1f} s] {stage}: {outcomes[stage]}", flush=True)
    summarise(options.out, outcomes)
    return 0 if all(outcome.startswith(("ok", "skipped")) for outcome in outcomes.values()) else 1


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


# --- summary -----------------------------------------------------------------------------------


def summarise(out: Path, outcomes: dict[str, str]) -> None:
    """Write summary.json and print its tables, over every job that OUT holds."""
    jobs = {name: job_summary(out / name) for name in JOBS if (out / name / "result.json").exists()}
    before = (read_json(out / "summary.json") or {}).get("outcomes", {})
    write_json(out / "summary.json", {"date": today(), "outcomes": {**before, **outcomes}, "jobs": jobs})
    print(
        f"\n{'job':22}{'batch':>6}{'mode':>9}{'host us':>9}{'replay':>8}{'step':>8}{'in a row':>9}{'floor':>7}  ms"
    )
    for name, job in jobs.items():
        for row in job["sizes"]:
            figures = [f"{number(row[column]):>{width}}" for column, width in COLUMNS]
            print(f"{name:22}{row['batch_size']:>6}{row['mode']:>9}{''.join(figures)}")
    for name, job in jobs.items():
        print(f"{name:22}{job['line']}")


COLUMNS = (
    *(("host_prepare_us_p50", 9), ("replay_ms_p50", 8), ("step_ms_p50", 8)),
    *(("back_to_back_ms", 9), ("roofline_ms", 7)),
)


def job_summary(folder: Path) -> dict[str, Any]:
    """Return the figures of a job that the tables show."""
    result = read_json(folder / "result.json") or {}
    captures = read_csv(folder / "capture.csv")
    memory = {
        name: sum(int(row[name] or 0) for row in captures)
        for name in (captures[0] if captures else {})
        if name.endswith("_bytes")
    }
    capture, attention = result.get("capture") or {}, result.get("attention") or {}
    parity, serve = result.get("parity") or {}, read_json(folder / "bench_serve.json") or {}
    mib = ", ".join(f"{name.removesuffix('_bytes')} {value / 2**20:.0f}" for name, value in memory.items())
    served = f"; {serve['completed']} requests, TPOT p50 {serve['median_tpot_ms']:.2f} ms" if serve else ""
    overhead = (result.get("size_sweep") or {}).get("overhead")
    measuring = f"; measuring took {overhead['measuring_share']:.2%} of the sweep" if overhead else ""
    return {
        "status": result.get("status"),
        "attention": attention,
        "capture_s": capture.get("seconds"),
        "capture_bytes": memory,
        "parity": {
            name: parity.get(name) for name in ("verified", "num_cases", "num_bitwise", "max_abs_error")
        },
        "warnings": result.get("warnings"),
        "overhead": overhead,
        "sizes": read_csv(folder / "sizes.csv"),
        "line": f"{result.get('status')}: {attention.get('backend')}, {len(captures)} graphs in "
        f"{number(capture.get('seconds'))} s, MiB: {mib}; parity {parity.get('verified')}{served}{measuring}",
    }


def number(value: Any) -> str:
    return "-" if value in (None, "") else f"{float(value):.2f}"


def read_csv(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def today() -> str:
    return datetime.now(UTC).date().isoformat()


if __name__ == "__main__":
    sys.exit(main())
