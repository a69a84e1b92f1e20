"""What measuring costs beside the samples: under 2% of the wall time of the size sweep.

    python -m pytest tests/bench/bench_overhead.py -s

A default sweep of the tiny model, recorded as a job records it. Where there is no GPU, NVML's answers are
made up and take a tenth of a millisecond each, as a driver's may.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.record import JobRecord
from harness.size_sweep import SizeSweep
from harness.telemetry import Telemetry
from tests.harness.fake_nvml import FakeNvml
from tests.harness.tiny import tiny_config, tiny_runner

ANSWER_S = 1e-4
SWEEP: dict[str, Any] = {
    "runner.max_batch_size": 16,
    "capture.sizes": [1, 2, 4, 8, 16],
    "measure.batch_sizes": [1, 3, 8, 16],
    "measure.min_samples": 20,
    "measure.timeout_s": 0.5,
    "measure.rounds": 2,
}


class SlowNvml(FakeNvml):
    """A driver whose answers take their time."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvmlDevice"):
            until = time.perf_counter() + ANSWER_S
            while time.perf_counter() < until:
                pass
        return super().__getattribute__(name)


@pytest.mark.timeout(300)
def test_measuring_costs_under_two_percent_of_the_sweep(tmp_path: Path) -> None:
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    telemetry = Telemetry.of(device) if device.type == "cuda" else SlowNvml().telemetry()
    with tiny_runner(SWEEP, str(device)) as runner, JobRecord(tmp_path) as record:
        sweep = SizeSweep(runner, tiny_config(SWEEP).measure, 0, 1e10, telemetry=telemetry)

        def on_row(row: dict[str, Any], samples: list[dict[str, Any]]) -> None:
            record.append("sizes", row)
            record.append_many("samples", samples)

        sweep.run(on_row)
    overhead = sweep.describe()["overhead"]
    print("\n" + ", ".join(f"{name} {value:.4g}" for name, value in overhead.items()))
    assert overhead["measuring_share"] < 0.02
