"""A sweep of tiny emulated jobs, a fifth of them with a planted fault, and what a job costs beyond itself.

    python tests/bench/bench_sweep.py            # 200 jobs, about ten minutes on two cores
    python tests/bench/bench_sweep.py --jobs 24

Prints a line for each kind of end, and where the time goes. A job itself is its phases, from reading the
configuration to the last step of the workload. Beyond it are, in the job's process: the fork, imports that are
left, writing and publishing the record; in the process of the sweep: composing the point, its hash, its row. The
fork server's imports come once.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Planted fault → (status, kind of the error) of its row.
ENDS = {
    None: ("ok", ""),
    "exception": ("failed", "RuntimeError"),
    "crash": ("killed", "SIGSEGV"),
    "kill": ("killed", "SIGKILL"),
    "exit": ("failed", "ProcessDied"),
    "hang": ("timeout", "JobTimeoutError"),
    "deaf": ("timeout", "ProcessDied"),
    "memory": ("killed", "MemoryGuard"),
}
#: `hang` ends itself at the time limit; `deaf` hears no signal and is killed half a minute later.
SHORT_FAULTS = ("exception", "crash", "kill", "exit", "hang", "memory")
LONG_FAULTS = ("exception", "crash", "kill", "exit", "deaf", "memory")
SHORT_JOB = (
    "device=cpu", "model.config.num_hidden_layers=1", "model.max_seq_len=32", "runner.max_batch_size=2",
    "capture=max_only", "measure=none", "parity.batch_sizes=[1]", "workload.max_requests=2", "workload.prompt_len=8",
    "workload.output_len=4", "tracking=disabled", "job.timeout_s=6", "job.max_memory_mib=1000",
)  # fmt: skip


@dataclass(frozen=True)
class PlantedSweep:
    """A sweep that ended: its rows, what was planted where, and what it took."""

    rows: list[dict[str, str]]
    planted: dict[str, str]
    exit_code: int
    printed: str
    wall_s: float
    #: Seconds that each job's phases took; of those that were not cut short.
    phases_s: dict[str, float]

    def wrong_rows(self) -> list[tuple[str, str, str]]:
        """Return (job, status, kind) of the rows that are not as planted."""
        found = [(row["job"], row["status"], row["error_kind"]) for row in self.rows]
        return [row for row in found if row[1:] != ENDS[self.planted.get(row[0])]]


def run_planted_sweep(
    folder: Path, num_jobs: int, faults: tuple[str, ...], share: float = 0.2
) -> PlantedSweep:
    """Run `num_jobs` jobs below `folder`; a `share` of them, chosen by chance, meets the faults in turn."""
    chosen = sorted(random.Random(0).sample(range(num_jobs), round(share * num_jobs)))
    planted = {str(seed): faults[index % len(faults)] for index, seed in enumerate(chosen)}
    begun = time.perf_counter()
    sweep = start_sweep(folder, range(num_jobs), planted)
    printed, errors = sweep.communicate()
    wall_s = time.perf_counter() - begun
    with (folder / "sweep" / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    phases_s = {row["job"]: _phases_s(Path(row["job_dir"])) for row in rows if row["status"] == "ok"}
    return PlantedSweep(rows, planted, sweep.returncode, printed + errors, wall_s, phases_s)


def start_sweep(folder: Path, seeds: Iterable[int], planted: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a sweep in `folder`/sweep of a job for each seed; `planted` says which meets which fault."""
    command = (sys.executable, "-m", "harness", "-m")
    path = os.pathsep.join(map(str, (ROOT / "tests" / "faults", ROOT)))
    return subprocess.Popen(
        [*command, f"seed={','.join(map(str, seeds))}", *SHORT_JOB, f"output_dir={folder}/sweep"],
        env=os.environ | {"PYTHONPATH": path, "HARNESS_TEST_FAULTS": json.dumps(planted)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _phases_s(job_dir: Path) -> float:
    return sum(json.loads((job_dir / "result.json").read_bytes())["timings"].values())


def main() -> int:
    """Run the sweep and print what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=200)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sweep = run_planted_sweep(Path(folder), arguments.jobs, LONG_FAULTS)
    print(
        f"{len(sweep.rows)} rows of {arguments.jobs} jobs in {sweep.wall_s / 60:.1f} min, exit code {sweep.exit_code}"
    )
    for (status, kind), count in sorted(Counter((r["status"], r["error_kind"]) for r in sweep.rows).items()):
        print(f"  {count:4d}  {status} {kind}")
    wrong = sweep.wrong_rows()
    print(f"rows not as planted: {wrong or 'none'}")
    duration_s = {row["job"]: float(row["duration_s"]) for row in sweep.rows}
    in_job = [duration_s[job] - phases for job, phases in list(sweep.phases_s.items())[1:]]
    around_s = (sweep.wall_s - sum(duration_s.values())) / len(sweep.rows)
    first = next(iter(sweep.phases_s))
    print(f"a job itself (median of the ok ones): {statistics.median(sweep.phases_s.values()):.2f} s")
    print(
        f"beyond it, in the job's process: median {statistics.median(in_job):.2f} s, longest {max(in_job):.2f} s"
    )
    print(f"beyond it, in the sweep's process: mean {around_s:.2f} s")
    print(
        f"once, with the first job: {duration_s[first] - sweep.phases_s[first]:.1f} s, the fork server's imports"
    )
    return 1 if wrong or len(sweep.rows) != arguments.jobs else 0


if __name__ == "__main__":
    sys.exit(main())
