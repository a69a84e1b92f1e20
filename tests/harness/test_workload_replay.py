"""A replay whose clock does not measure is the same to the byte; one that measures says what differs."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.experiment import run_job
from harness.progress import Progress
from harness.record import JobRecord, Status
from harness.record_reader import read_bench_serve, read_result, read_stream
from harness.workload.source import load_workload
from harness.workload_replay import replay_workload
from tests.harness.fake_nvml import FakeNvml, throttled_first
from tests.harness.tiny import tiny_config, tiny_runner, tiny_yaml

QUIET = Progress(quiet=True)
FILES = ("steps.parquet", "requests.parquet", "bench_serve.json")
#: Requests that overlap, so that the batches depend on the times of the steps.
TRAFFIC = {
    "workload.max_requests": 16,
    "workload.request_rate": 200.0,
    "workload.prompt_len": {"distribution": "uniform", "min": 4, "max": 40},
    "workload.output_len": {"distribution": "uniform", "min": 2, "max": 12},
    "parity.enabled": False,
    "model.config.num_hidden_layers": 1,
}
FIXED = {"workload.clock": "fixed", "workload.fixed_step_ms": 2.5, "measure.enabled": False}


def run(job_dir: Path, overrides: dict[str, Any], progress: Progress = QUIET) -> Path:
    assert run_job(tiny_yaml(TRAFFIC | overrides), job_dir, progress) is Status.OK
    return job_dir


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("measured")
    return [run(folder / name, {}) for name in ("a", "b")]


@pytest.fixture(scope="module", params=["fixed", "costs", "costs, padding by costs"])
def reproduced(
    request: pytest.FixtureRequest, measured: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    """Two runs by a clock that does not measure; the second measures a size sweep of its own first."""
    costs = {"workload.clock": "costs", "workload.costs_path": str(measured[0] / "sizes.csv")}
    overrides = FIXED if request.param == "fixed" else costs
    if "padding" in request.param:
        overrides = overrides | {"padding.strategy": "cheapest"}
    folder = tmp_path_factory.mktemp("reproduced")
    return [
        run(folder / "a", overrides | {"measure.enabled": False}),
        run(folder / "b", overrides | {"measure.enabled": True}),
    ]


@pytest.mark.parametrize("name", FILES)
def test_two_runs_write_the_same_bytes(reproduced: list[Path], name: str) -> None:
    first, second = (folder / name for folder in reproduced)
    assert first.read_bytes() == second.read_bytes()


def test_nothing_measured_stands_in_the_rows_of_a_clock_that_does_not_measure(reproduced: list[Path]) -> None:
    steps = read_stream(reproduced[0], "steps")
    assert steps[["host_prepare_us", "host_exposed_us", "replay_ms", "throttled"]].isna().all(axis=None)
    assert (steps["clock_ms"].diff() - steps["step_ms"]).iloc[1:].min() >= -1e-9
    workload = read_result(reproduced[0])["workload"]
    assert workload["differs_between_runs"] == {}
    assert workload["clock"] == read_bench_serve(reproduced[0])["clock"] != "measured"


def test_the_measured_clock_says_which_columns_differ_and_the_others_do_not(measured: list[Path]) -> None:
    differs = read_result(measured[0])["workload"]["differs_between_runs"]
    assert {"clock_ms", "step_ms", "batch_size"} <= set(differs["steps"])
    assert {"ttft_ms", "tpot_ms", "e2el_ms"} <= set(differs["requests"])
    first, second = (read_stream(folder, "requests").sort_values("request_id") for folder in measured)
    same = [name for name in first.columns if name not in differs["requests"]]
    assert set(same) == {"request_id", "arrival_s", "prompt_len", "output_len", "status"}
    assert first[same].reset_index(drop=True).equals(second[same].reset_index(drop=True))
    assert not first["ttft_ms"].reset_index(drop=True).equals(second["ttft_ms"].reset_index(drop=True))


def test_a_measured_replay_keeps_what_it_measured(measured: list[Path]) -> None:
    steps = read_stream(measured[0], "steps")
    assert (steps["step_ms"] > 0).all()
    assert steps.loc[steps["phase"] == "decode", "host_prepare_us"].notna().all()


def test_the_statistics_are_printed_before_the_replay_and_recorded(tmp_path: Path) -> None:
    text = io.StringIO()
    run(tmp_path, FIXED, Progress(Console(file=text, width=200)))
    printed = text.getvalue()
    statistics = read_result(tmp_path)["workload"]["statistics"]
    assert "requests: 16 over" in printed and "prompt tokens: mean" in printed
    expected = f"expected batch size: {statistics['expected_batch']:.1f}"
    assert printed.index("requests: 16") < printed.index(expected) < printed.index("workload replay: 0/16")
    assert "clock: 2.5 ms a step; every run gives the same files" in printed
    assert statistics["inter_arrival_cv"] > 0 and statistics["prompt_len"]["p99"] <= 40


def test_the_expected_batch_comes_true(tmp_path: Path) -> None:
    steady_load = {
        "workload.max_requests": 60,
        "workload.arrival": "constant",
        "workload.request_rate": 80.0,
        "workload.prompt_len": 8,
        "workload.output_len": 11,
        "workload.fixed_step_ms": 2.0,
    }
    run(tmp_path, FIXED | steady_load)
    workload = read_result(tmp_path)["workload"]
    assert workload["statistics"]["expected_batch"] == pytest.approx(1.6 / 0.84)
    assert workload["mean_batch_size"] == pytest.approx(workload["statistics"]["expected_batch"], rel=0.1)


def test_the_record_says_when_the_load_rose_and_when_it_drained(measured: list[Path]) -> None:
    workload, requests = read_result(measured[0])["workload"], read_stream(measured[0], "requests")
    finished_ms = requests["sent_s"] * 1e3 + requests["e2el_ms"]
    assert workload["ramp_end_ms"] == pytest.approx(finished_ms.min())
    assert workload["drain_start_ms"] == pytest.approx(requests["sent_s"].max() * 1e3)


def test_a_choice_by_this_runs_own_costs_is_warned_about(tmp_path: Path) -> None:
    run(tmp_path, FIXED | {"padding.strategy": "split", "measure.enabled": True})
    (warning,) = [text for text in read_result(tmp_path)["warnings"] if "padding.strategy=split" in text]
    assert "give padding.costs_path" in warning


@pytest.mark.parametrize("kind", ["ramp", "lengths", "synthetic", "steady"])
def test_every_made_workload_runs(tmp_path: Path, kind: str) -> None:
    run(tmp_path, FIXED | {"workload.kind": kind, "model.max_seq_len": 64})
    assert len(read_stream(tmp_path, "requests")) == 16
    idle = [text for text in read_result(tmp_path)["warnings"] if "unused" in text]
    assert len(idle) == (kind == "steady"), idle


def test_a_trace_can_be_brought_to_a_rate(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(f'{{"timestamp": {second}, "input_length": 8, "output_length": 4}}\n' for second in range(10))
    )
    source = {"kind": "trace", "path": str(trace), "format": "timed_trace", "sec_multiplier": 60.0}
    as_it_is = FIXED | {f"workload.{name}": value for name, value in source.items()}
    run(tmp_path / "own", as_it_is | {"workload.request_rate": None})
    run(tmp_path / "set", as_it_is | {"workload.request_rate": 5.0})
    own, at_5 = (read_result(tmp_path / name)["workload"]["statistics"] for name in ("own", "set"))
    assert own["duration_s"] == 540.0
    assert at_5["request_rate"] == pytest.approx(5.0)


def test_the_replay_tells_the_range_of_the_card_and_the_energy_of_a_token(tmp_path: Path) -> None:
    config, nvml = (
        tiny_config(TRAFFIC),
        FakeNvml(throttled_first(1), sm_clocks_mhz=itertools.cycle([1980, 1700])),
    )
    with tiny_runner(TRAFFIC) as runner, JobRecord(tmp_path) as record:
        workload = load_workload(config)
        tally, latencies = replay_workload(runner, workload, config, record, lambda: None, nvml.telemetry())
    assert tally.telemetry is not None
    assert tally.telemetry["num_looks"] >= 1 and tally.telemetry["num_throttled_looks"] == 1
    assert tally.telemetry["power_w"] == {"min": 412.5, "median": 412.5, "max": 412.5}
    assert tally.telemetry["energy_j"] == 0.5
    assert tally.telemetry["energy_mj_per_token"] == pytest.approx(500 / latencies.num_output_tokens)


def test_without_a_card_the_replay_has_no_telemetry(measured: list[Path]) -> None:
    assert read_result(measured[0])["workload"]["telemetry"] is None
