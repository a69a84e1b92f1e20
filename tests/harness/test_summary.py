"""The last tables say what was measured, how far to trust it, and what to do next."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.compose import compose
from harness.next_step import next_command
from harness.record import STEPS_SCHEMA, JobRecord, Status
from harness.record_reader import read_result, read_stream
from harness.schema import check, load_config
from harness.summary import summary_text
from harness.workload_shares import mode_shares, padding_waste
from tests.harness.job_folder import CONFIG, ENVIRONMENT, capture_row, sizes_row, step_row, write_job


def line_with(text: str, *words: str) -> str:
    (line,) = [line for line in text.splitlines() if all(word in line for word in words)]
    return line


def test_a_summary_shows_sizes_batches_modes_waste_and_latencies(tmp_path: Path) -> None:
    write_job(tmp_path, graph_backend="cuda")
    text = summary_text(tmp_path)
    assert f"{tmp_path}: ok" in text
    assert line_with(text, "8", "0.080", "0.03").split() == ["8", "0.080", "0.03", "0.00", "0.00", "-"]
    assert line_with(text, "128", "6.000").split() == [
        "3",
        "128",
        "4",
        "1.500",
        "25.0%",
        "6.000",
        "25.0%",
        "2.0%",
        "55",
    ]
    assert line_with(text, "graph", "padded", "%").split()[2:] == ["3.0", "20", "66.7%", "66.7%", "-"]
    assert line_with(text, "eager", "above_max").split()[2:] == ["12.0", "10", "33.3%", "33.3%", "-"]
    assert "padding waste: 25.0%" in text
    assert line_with(text, "TTFT").split() == ["TTFT", "12.50", "11.00", "30.00"]
    assert line_with(text, "TPOT").split() == ["TPOT", "4.50", "4.25", "9.00"]
    assert "result.json, capture.csv, sizes.csv" in text
    assert "next: python -m harness" in text


def test_emulated_stands_wherever_a_latency_does(tmp_path: Path) -> None:
    write_job(tmp_path, graph_backend="emulated")
    lines = summary_text(tmp_path).splitlines()
    tables = ["Capture sizes", "Batch sizes", "Decode steps", "Latencies"]
    for title in tables:
        start = lines.index(next(line for line in lines if line.startswith(title)))
        rule = next(index for index in range(start, len(lines)) if "───" in lines[index])
        head = "\n".join(lines[start:rule])
        num_latencies = {"Capture sizes": 1, "Batch sizes": 5, "Decode steps": 2, "Latencies": 3}[title]
        assert head.count("emulated") == num_latencies, head
    assert line_with("\n".join(lines), "requests/s").endswith("(emulated)")


def test_measured_steps_of_a_workload_are_held_against_the_floor(tmp_path: Path) -> None:
    """4 MB at 10 GB/s: 0.4 ms of steps of 2 ms; under a clock that charges, there is nothing to hold."""
    floor = {"decode_weight_bytes": 4e6, "kv_bytes_per_token": 0, "copy_bandwidth_bytes_per_s": 1e10}
    for clock, share in (("measured", "20.0%"), ("fixed", "-")):
        with write_job(tmp_path) as record:
            record.update(size_sweep=floor, workload={"clock": clock})
        assert line_with(summary_text(tmp_path), "padded", "66.7%").split()[-1] == share


def test_what_the_card_told_stands_in_a_line(tmp_path: Path) -> None:
    with JobRecord(tmp_path) as record:
        for clock in (1980, 1755):
            told = {"sm_clock_mhz": clock, "power_w": 400.0, "energy_mj_per_token": clock / 1000}
            record.append("sizes", sizes_row(8, "graph", "cuda") | told)
        energy = {"energy_mj_per_token": 12.5, "energy_j": 40.0}
        record.update(workload={"telemetry": {"sm_clock_mhz": {"min": 1700, "max": 1980}} | energy})
    line = line_with(summary_text(tmp_path), "card:")
    assert "SM clock 1868 MHz (1700 to 1980); power 400 W (throughout)" in line
    assert "energy a token 1.75 mJ (steps in a row at batch 8, graph: the least of the sweep)" in line
    assert "energy a token 12.5 mJ (workload, prefill included; 40 J in all)" in line


def test_the_longest_kernels_of_the_largest_graph_are_shown(tmp_path: Path) -> None:
    write_job(tmp_path, graph_backend="cuda")
    text = summary_text(tmp_path)
    assert "Where the kernels of a step at batch 8 (graph) go" in text
    assert line_with(text, "gemm").split() == ["gemm<bf16,", "8>(int)", "28", "600.0", "75.0%"]
    assert "56 kernels, copies and fills in the graph at batch 8, 3 around it: 790 µs busy of 900" in text


def test_a_latency_that_never_got_quiet_is_marked(tmp_path: Path) -> None:
    record = JobRecord(tmp_path)
    record.append(
        "sizes", sizes_row(8, "graph", "cuda") | {"unmet_condition": "rel_std 0.4 > max_noise 0.05"}
    )
    record.append("sizes", sizes_row(8, "eager", "none"))
    text = summary_text(tmp_path)
    assert line_with(text, "128", "1.500").split()[3:7] == ["1.500", "!", "25.0%", "11.000"]
    assert "! a stopping condition was not met" in text


def test_a_cuda_job_is_never_called_emulated(tmp_path: Path) -> None:
    write_job(tmp_path, graph_backend="cuda")
    assert "emulated" not in summary_text(tmp_path)


@pytest.mark.parametrize("verified", [True, False])
def test_a_job_without_parity_proof_bears_a_banner(tmp_path: Path, verified: bool) -> None:
    write_job(tmp_path, verified=verified)
    assert ("UNVERIFIED" in summary_text(tmp_path)) is not verified


def test_a_failed_job_shows_its_error_and_what_it_left(tmp_path: Path) -> None:
    write_job(tmp_path, finish=False)
    record = JobRecord.attach(tmp_path)
    record.update(
        status=Status.KILLED, error={"kind": "SIGKILL", "message": "out of memory", "traceback": None}
    )
    text = summary_text(tmp_path)
    assert f"{tmp_path}: killed" in text and "SIGKILL: out of memory" in text
    assert line_with(text, "graph", "padded").split()[3] == "20"
    assert "parts/steps.jsonl" in text


def test_a_job_refused_at_once_has_no_empty_tables(tmp_path: Path) -> None:
    error = {"kind": "ConfigError", "message": "seed=-1: write a number", "traceback": ""}
    JobRecord(tmp_path).update(status=Status.INVALID_CONFIG, error=error)
    text = summary_text(tmp_path)
    assert "seed=-1: write a number" in text and "───" not in text


def test_a_wandb_failure_is_told_with_its_reason(tmp_path: Path) -> None:
    write_job(tmp_path)
    JobRecord.attach(tmp_path).update(wandb={"status": "failed", "reason": "disk full", "dir": None})
    assert "W&B failed, the record is complete: disk full" in summary_text(tmp_path)


def test_a_long_capture_list_is_thinned_and_says_so(tmp_path: Path) -> None:
    record = JobRecord(tmp_path)
    record.append_many("capture", [capture_row(size, "cuda") for size in range(1, 101)])
    text = summary_text(tmp_path)
    assert "16 of 100 rows; all are in capture.csv" in text
    assert line_with(text, "100", "1.000")


class TestNextCommand:
    def command(self, steps: pd.DataFrame | None = None, **changes: Any) -> str:
        result = {"status": "ok", "config": CONFIG, "environment": ENVIRONMENT} | changes
        empty = pd.DataFrame(columns=list(STEPS_SCHEMA))
        return next_command(result, empty if steps is None else steps)[0]

    def test_a_user_without_a_trace_is_pointed_to_one(self) -> None:
        expected = "python -m harness capture=explicit workload=trace workload.path=YOUR_TRACE.csv"
        assert self.command().startswith(expected)

    def test_after_running_out_of_memory_half_as_much_is_captured(self) -> None:
        assert "capture.max_size=4" in self.command(status=Status.CAPTURE_OOM)

    def test_after_a_failed_parity_and_a_timeout(self) -> None:
        assert "parity.on_failure=warn" in self.command(status=Status.PARITY_FAILED)
        assert "measure=quick" in self.command(status=Status.TIMEOUT)
        assert self.command(status=Status.FAILED) == "python -m harness doctor"

    def test_what_was_interrupted_can_be_typed_again(self) -> None:
        assert self.command(status=Status.INTERRUPTED) == "python -m harness capture=explicit"

    def test_steps_above_the_largest_capture_size_ask_for_a_longer_list(self, tmp_path: Path) -> None:
        write_job(tmp_path)
        steps = read_stream(tmp_path, "steps")
        assert self.command(steps) == "python -m harness capture=all"
        config = CONFIG | {"capture": {"policy": "vllm", "max_size": 8}}
        result = read_result(tmp_path) | {"config": config}
        command, reason = next_command(result, steps)
        assert "capture.max_size=12" in command and reason.startswith("33% of the decode steps")

    @pytest.mark.parametrize(
        "overrides",
        [
            ["capture=explicit", "capture.sizes=[1,4,16]"],
            ["experiment=padding_strategies"],
            ["experiment=padding_strategies", "capture.sizes=[2,16]"],
            ["experiment=ceiling_feedback", "workload.burst_size=0"],
            ["workload=steady", "workload.batch_size=4"],
        ],
    )
    def test_what_is_suggested_composes_and_can_run(self, overrides: list[str], tmp_path: Path) -> None:
        write_job(tmp_path)
        config = asdict(load_config(compose(overrides)))
        environment = {"command": ["__main__.py", *overrides]}
        for steps in (read_stream(tmp_path, "steps"), None):
            command = self.command(steps, config=config, environment=environment)
            words = shlex.split(command)[3:]
            if "workload.path=YOUR_TRACE.csv" in words:
                words.remove("workload.path=YOUR_TRACE.csv")
                words.append("workload.enabled=false")
            check(load_config(compose(words)))

    def test_an_override_is_changed_and_not_given_twice(self) -> None:
        environment = {
            "command": [
                "__main__.py",
                "capture=vllm",
                "seed=3",
                "measure=default",
                "--hidden",
                "output_dir=/x",
            ]
        }
        command = self.command(status=Status.TIMEOUT, environment=environment)
        assert command == "python -m harness capture=vllm seed=3 measure=quick"


class TestShares:
    def steps(self, *rows: dict[str, Any]) -> pd.DataFrame:
        return pd.DataFrame([step_row(1) | row for row in rows])

    def test_only_decode_steps_count(self) -> None:
        steps = self.steps(
            {}, {"phase": "prefill", "mode": "eager", "padded_batch_size": 9, "step_ms": 100.0}
        )
        (share,) = mode_shares(steps)
        assert (share.mode, share.num_steps, share.share, share.time_share) == ("graph", 1, 1.0, 1.0)
        assert padding_waste(steps) == pytest.approx(1 / 4)

    def test_nine_requests_in_sixteen_rows_waste_seven_sixteenths(self) -> None:
        steps = self.steps(
            {"batch_size": 9, "padded_batch_size": 16},
            {"batch_size": 9, "padded_batch_size": 9, "mode": "eager"},
        )
        assert padding_waste(steps) == pytest.approx(7 / 16)

    def test_shares_add_up_to_one(self, tmp_path: Path) -> None:
        write_job(tmp_path)
        shares = mode_shares(read_stream(tmp_path, "steps"))
        assert sum(share.share for share in shares) == pytest.approx(1.0)
        assert sum(share.time_share or 0.0 for share in shares) == pytest.approx(1.0)

    def test_nothing_replayed_is_no_waste_figure(self) -> None:
        assert padding_waste(self.steps({"mode": "eager"})) is None
        assert mode_shares(self.steps({"phase": "prefill"})) == []
