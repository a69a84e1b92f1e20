"""Time and memory of loading a trace: 100,000 rows in under 2 s, a million in under 10 s and 500 MB.

python -m pytest tests/bench/bench_traces.py -s
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.workload.shaping import Shaping
from harness.workload.traces import load_trace


def write_azure(path: Path, num_rows: int) -> None:
    rng = np.random.default_rng(0)
    prompt_len, output_len = rng.integers(1, 4000, (2, num_rows))
    stamps = np.datetime64("2023-11-16T18:00:00", "ns") + np.arange(num_rows) * np.timedelta64(
        1_234_500, "ns"
    )
    texts = np.char.replace(np.datetime_as_string(stamps, unit="ns"), "T", " ")
    with path.open("w") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n")
        rows = zip(texts, prompt_len, output_len, strict=True)
        file.writelines(f"{text[:-2]},{prompt},{output}\n" for text, prompt, output in rows)


def write_mooncake(path: Path, num_rows: int) -> None:
    hash_ids = list(range(24))
    with path.open("w") as file:
        file.writelines(
            f'{{"timestamp": {row // 10 * 3000}, "input_length": 12000, "output_length": 300, '
            f'"hash_ids": {hash_ids}}}\n'
            for row in range(num_rows)
        )


@pytest.mark.parametrize("num_rows", [100_000, 1_000_000])
@pytest.mark.parametrize(("format_name", "write"), [("azure", write_azure), ("mooncake", write_mooncake)])
def test_load(benchmark, tmp_path: Path, format_name: str, write, num_rows: int) -> None:
    path = tmp_path / "trace"
    write(path, num_rows)
    workload = benchmark.pedantic(load_trace, (path, format_name, Shaping(max_seq_len=4096)), rounds=1)
    assert len(workload) == num_rows
    print(
        f"\n{format_name}, {num_rows} rows: {benchmark.stats['mean']:.2f} s, {peak_mib(path, format_name)} MiB"
    )


def peak_mib(path: Path, format_name: str) -> int:
    """Peak memory of a fresh process that loads the trace and nothing else.

    Not `ru_maxrss`: a child starts with its parent's.
    """
    program = (
        "from harness.workload.shaping import Shaping; "
        "from harness.workload.traces import load_trace; "
        f"load_trace({str(path)!r}, {format_name!r}, Shaping(max_seq_len=4096)); "
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return int(done.stdout) // 1024
