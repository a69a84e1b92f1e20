from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.errors import ConfigError
from harness.experiment import Experiment, run_job
from harness.progress import Progress
from harness.record import STREAMS, Status
from harness.record_reader import read_bench_serve, read_result, read_stream, read_table
from harness.report.command import write_report
from harness.schema import load_config
from harness.summary import summary_text
from runners.attention.torch_backend import TorchAttentionBackend
from runners.forward_batch import ForwardBatch, ForwardMode
from runners.graph_backend import EmulatedGraph
from runners.padding import StepCosts
from tests.harness.tiny import tiny_yaml

QUIET = Progress(quiet=True)
_part = ForwardBatch.part


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    job_dir = tmp_path_factory.mktemp("job")
    measured = {"measure.profile": True, "measure.longest_lens": [40], "measure.loop_batch_sizes": [2]}
    assert run_job(tiny_yaml(measured), job_dir, QUIET) is Status.OK
    return job_dir


def test_a_job_leaves_every_file_with_rows_and_the_columns_of_the_schema(job: Path) -> None:
    for name, stream in STREAMS.items():
        frame = read_stream(job, name)
        assert (job / stream.file_name).exists()
        assert list(frame.columns) == list(stream.columns), name
        assert len(frame) > 0, name
    assert not (job / "parts").exists()


def test_result_json_tells_what_ran_and_that_it_was_emulated(job: Path) -> None:
    result = read_result(job)
    assert result["status"] == "ok"
    assert result["graph_backend"] == "emulated"
    assert result["parity"]["verified"] is True
    assert result["model"]["model_type"] == "qwen3"
    assert result["capture"]["sizes"] == [2, 4]
    assert result["config"]["runner"]["max_batch_size"] == 4
    assert result["environment"]["versions"]["torch"]
    assert len(result["config_hash"]) == 64


def test_every_row_that_bears_a_latency_says_which_backend_it_ran_on(job: Path) -> None:
    sizes = read_stream(job, "sizes")
    assert set(sizes[sizes["mode"] == "graph"]["graph_backend"]) == {"emulated"}
    assert set(sizes[sizes["mode"] == "eager"]["graph_backend"]) == {"none"}
    assert set(read_stream(job, "ragged")["graph_backend"]) == {"emulated"}
    loop = read_stream(job, "loop")
    assert set(loop[loop["phase"] == "decode"]["graph_backend"]) == {"emulated"}
    steps, prefill = read_stream(job, "steps"), read_stream(job, "prefill")
    assert set(steps[steps["phase"] == "decode"]["graph_backend"]) == {"emulated"}
    assert (
        set(steps[steps["phase"] == "prefill"]["graph_backend"]) == set(prefill["graph_backend"]) == {"none"}
    )
    for name in ("steps", "requests", "samples"):
        metadata = read_table(job, name).schema.metadata
        assert metadata[b"graph_backend"] == b"emulated", name
    bench = read_bench_serve(job)
    assert bench is not None and bench["graph_backend"] == "emulated"


def test_the_seconds_of_every_phase_are_recorded(job: Path) -> None:
    timings = read_result(job)["timings"]
    before = ("validate", "copy_memory", "build", "capture", "parity", "size_sweep", "loop_sweep")
    assert list(timings) == [
        f"{name}_s" for name in (*before, "workload_replay", "loop_sweep_again", "profile")
    ]
    assert all(seconds > 0 for seconds in timings.values())


def test_every_request_is_answered_once_and_the_summary_counts_them(job: Path) -> None:
    requests = read_stream(job, "requests")
    bench = read_bench_serve(job)
    assert sorted(requests["request_id"]) == list(range(6))
    assert bench is not None and bench["completed"] == 6
    assert bench["total_output_tokens"] == 30


def test_the_replay_adds_up_to_its_steps(job: Path) -> None:
    workload, steps = read_result(job)["workload"], read_stream(job, "steps")
    decode = steps[steps["phase"] == "decode"]
    assert workload["num_decode_steps"] == len(decode)
    assert sum(workload["mode_shares"].values()) == pytest.approx(1)
    wasted = (decode["padded_batch_size"] - decode["batch_size"]).sum() / decode["padded_batch_size"].sum()
    assert workload["padding_waste"] == pytest.approx(wasted)


def test_an_invalid_configuration_is_recorded_before_a_weight_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runners.models.loader.load_model", lambda *_: pytest.fail("a weight was loaded"))
    assert run_job(tiny_yaml({"capture.sizes": [8]}), tmp_path, QUIET) is Status.INVALID_CONFIG
    error = read_result(tmp_path)["error"]
    assert "capture.sizes" in error["message"]


@pytest.mark.parametrize(
    "given",
    [
        Path("nowhere.yaml"),
        "nowhere.yaml",
        "seed: 0 # as in mine.yaml",
        "not_a_config.txt",
        Path("."),
        "[1, 2]",
        "\x00",
        "a" * 5000,
    ],
)
def test_what_is_no_configuration_is_recorded_as_invalid(
    given: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("not_a_config.txt").write_bytes(b"\xff\xfe")
    assert run_job(given, tmp_path / "job", QUIET) is Status.INVALID_CONFIG
    assert read_result(tmp_path / "job")["status"] == "invalid_config"


def test_a_configuration_is_read_from_a_path_or_from_its_text(tmp_path: Path) -> None:
    for name in ("job.yaml", "job.yml", "job.txt"):
        (tmp_path / name).write_text("seed: 7\n")
        assert load_config(str(tmp_path / name)).seed == load_config(tmp_path / name).seed == 7
    assert load_config("seed: 7").seed == 7
    assert load_config("seed: 7\ntracking: {project: x.yaml}").tracking.project == "x.yaml"
    assert load_config("").seed == 0


def test_an_error_of_our_own_before_the_first_phase_is_a_recorded_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: object) -> None:
        raise ZeroDivisionError("a rule is wrong")

    monkeypatch.setattr("harness.experiment.check", fail)
    assert run_job(tiny_yaml(), tmp_path, QUIET) is Status.FAILED
    assert read_result(tmp_path)["error"]["kind"] == "ZeroDivisionError"


def test_a_folder_that_cannot_be_had_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output_dir=.*file: File exists: give a folder"):
        run_job(tiny_yaml(), tmp_path / "file", QUIET)


def test_a_refused_job_prints_no_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("harness.memory._free_host_bytes", lambda: 1)
    assert run_job(tiny_yaml(), tmp_path) is Status.INVALID_CONFIG
    assert capsys.readouterr().out == ""


def test_a_pool_smaller_than_the_batch_is_preempted_and_still_proven_and_measured(tmp_path: Path) -> None:
    overcommitted = {
        "attention.overcommit": True,
        "attention.num_pages": 6,
        "model.max_seq_len": 64,
        "runner.max_batch_size": 8,
        "capture.sizes": [2, 4, 8],
        "measure.batch_sizes": [],
        "workload.prompt_len": 20,
        "workload.output_len": 40,
        "workload.max_requests": 8,
        "workload.request_rate": float("inf"),
    }
    assert run_job(tiny_yaml(overcommitted), tmp_path, QUIET) is Status.OK, read_result(tmp_path)["error"]
    result = read_result(tmp_path)
    assert result["workload"]["num_preemptions"] > 0
    assert result["parity"]["verified"] is True
    assert max(case["batch_size"] for case in result["parity"]["cases"]) == 5
    assert read_stream(tmp_path, "sizes")["batch_size"].max() == 2
    assert sorted(read_stream(tmp_path, "requests")["request_id"]) == list(range(8))


def test_points_that_the_pool_cannot_hold_are_refused_before_a_weight_is_loaded(tmp_path: Path) -> None:
    config = {"attention.overcommit": True, "attention.num_pages": 6, "model.max_seq_len": 64}
    assert (
        run_job(tiny_yaml(config | {"measure.batch_sizes": [2, 3]}), tmp_path, QUIET) is Status.INVALID_CONFIG
    )
    message = read_result(tmp_path)["error"]["message"]
    assert "measure.batch_sizes=[2,3]: attention.num_pages=6 holds 2 requests of 24 tokens" in message


def test_plans_that_measured_costs_bring_are_proven_before_the_workload_runs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = StepCosts({1: 1.0, 2: 1.0, 4: 9.0}, {}, "emulated")
    monkeypatch.setattr(StepCosts, "from_rows", lambda rows: costs)
    config = tiny_yaml(
        {"padding.strategy": "split", "capture.sizes": [1, 2, 4], "workload.request_rate": 1e6}
    )
    assert run_job(config, tmp_path, QUIET) is Status.OK, read_result(tmp_path)["error"]
    cases = read_result(tmp_path)["parity"]["cases"]
    proven = {(case["mode"], tuple(case["sizes"])) for case in cases}
    assert {("graph", (4,)), ("split", (2, 2)), ("split", (2, 1))} <= proven
    assert {case["plan_reason"] for case in cases} == {"no_costs", "cheaper_split"}
    steps = read_stream(tmp_path, "steps")
    assert "cheaper_split" in set(steps["reason"])


def test_a_plan_by_cost_that_is_wrong_fails_parity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCosts, "from_rows", lambda rows: StepCosts({2: 1.0, 4: 9.0}, {}, "emulated"))
    monkeypatch.setattr(  # a split that gives each part the requests of the first
        ForwardBatch, "part", lambda batch, start, end: _part(batch, 0, end - start)
    )
    config = tiny_yaml({"padding.strategy": "split"})
    assert run_job(config, tmp_path, QUIET) is Status.PARITY_FAILED
    assert read_result(tmp_path)["parity"]["cases"][-1]["plan_reason"] == "cheaper_split"


@pytest.mark.parametrize(("over_length", "number"), [("clip", "6 requests"), ("skip", "requests longer")])
def test_requests_that_are_not_those_asked_for_are_warned_about(
    over_length: str, number: str, tmp_path: Path
) -> None:
    lengths = {"distribution": "uniform", "min": 20, "max": 90}
    config = {
        "model.max_seq_len": 64,
        "workload.over_length": over_length,
        "workload.prompt_len": 90 if over_length == "clip" else lengths,
    }
    assert run_job(tiny_yaml(config), tmp_path, QUIET) is Status.OK, read_result(tmp_path)["error"]
    (warning,) = [text for text in read_result(tmp_path)["warnings"] if "model.max_seq_len" in text]
    assert number in warning
    assert warning in summary_text(tmp_path)


def _out_of_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB, of which 1.00 GiB is free.")


def test_a_capture_without_memory_says_how_far_it_came_and_what_to_lower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture, captured = EmulatedGraph.capture, []

    def fail_on_the_second(graph: EmulatedGraph, *args: Any) -> None:
        captured.append(graph)
        capture(graph, *args) if len(captured) == 1 else _out_of_memory()

    monkeypatch.setattr(EmulatedGraph, "capture", fail_on_the_second)
    assert run_job(tiny_yaml(), tmp_path, QUIET) is Status.CAPTURE_OOM
    error = read_result(tmp_path)["error"]
    assert error["kind"] == "CaptureOutOfMemoryError"
    assert "size 2 ran out of memory" in error["message"]
    assert list(read_stream(tmp_path, "capture")["capture_size"]) == [4]


@pytest.mark.parametrize("where", ["runners.models.loader.load_model", "harness.executor.extend_batch"])
def test_memory_that_runs_out_elsewhere_is_a_failure_of_that_kind(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, _out_of_memory)
    assert run_job(tiny_yaml({"measure.enabled": False}), tmp_path, QUIET) is Status.FAILED
    result = read_result(tmp_path)
    assert (result["status"], result["error"]["kind"]) == ("failed", "OutOfMemoryError")


def test_an_unsupported_family_is_refused_by_name(tmp_path: Path) -> None:
    status = run_job(tiny_yaml({"model.config.model_type": "mixtral"}), tmp_path, QUIET)
    assert status is Status.INVALID_CONFIG
    assert "mixtral" in read_result(tmp_path)["error"]["message"]


def _keep_the_plan_of_the_dummy_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-LLM#18769: replays run the plan of the capture."""

    def plan(
        self: TorchAttentionBackend, bs: int, rows: torch.Tensor, lens: torch.Tensor, *_: object
    ) -> None:
        dummy_rows, dummy_lens = torch.zeros_like(rows), torch.ones_like(lens)
        self.init_forward_metadata_capture_cuda_graph(bs, bs, dummy_rows, dummy_lens, ForwardMode.DECODE)

    monkeypatch.setattr(TorchAttentionBackend, "init_forward_metadata_replay_cuda_graph", plan)


def test_a_replay_that_keeps_the_plan_of_the_capture_fails_parity_and_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _keep_the_plan_of_the_dummy_batch(monkeypatch)
    assert run_job(tiny_yaml(), tmp_path, QUIET) is Status.PARITY_FAILED
    result = read_result(tmp_path)
    assert result["parity"]["verified"] is False
    assert result["error"]["kind"] == "ParityFailedError"
    assert len(read_stream(tmp_path, "capture")) == 2
    assert len(read_stream(tmp_path, "sizes")) == 0


def test_a_failed_parity_with_warn_goes_on_unverified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _keep_the_plan_of_the_dummy_batch(monkeypatch)
    assert run_job(tiny_yaml({"parity.on_failure": "warn"}), tmp_path, QUIET) is Status.OK
    result = read_result(tmp_path)
    assert result["parity"]["verified"] is False
    assert any("parity failed" in warning for warning in result["warnings"])


def test_without_parity_the_record_says_unverified(tmp_path: Path) -> None:
    config = tiny_yaml({"parity.enabled": False, "measure.enabled": False, "workload.enabled": False})
    assert run_job(config, tmp_path, QUIET) is Status.OK
    assert read_result(tmp_path)["parity"] == {"verified": False, "reason": "parity.enabled=false"}


def test_a_job_over_its_time_limit_ends_with_status_timeout_and_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size_sweep = Experiment.size_sweep

    def end_soon(experiment: Experiment) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.01)  # the rest of the time is over, whatever the captures took
        size_sweep(experiment)

    monkeypatch.setattr(Experiment, "size_sweep", end_soon)
    config = tiny_yaml({"job.timeout_s": 200.0, "measure.min_samples": 10_000, "measure.timeout_s": 60.0})
    assert run_job(config, tmp_path, QUIET) is Status.TIMEOUT
    assert "job.timeout_s=200" in read_result(tmp_path)["error"]["message"]
    assert len(read_stream(tmp_path, "capture")) == 2


@pytest.mark.parametrize("strategy", ["exact", "max", "cheapest", "split"])
def test_every_padding_strategy_runs_end_to_end(tmp_path: Path, strategy: str) -> None:
    assert run_job(tiny_yaml({"padding.strategy": strategy}), tmp_path, QUIET) is Status.OK
    assert read_result(tmp_path)["parity"]["verified"] is True


def test_batches_that_the_policy_refuses_fail_the_job_only_where_the_traffic_brings_them(
    tmp_path: Path,
) -> None:
    """Parity and the size sweep leave them out: there is nothing of them to prove or to time in a graph."""
    gap = {"capture.sizes": [1, 2], "capture.allow_gap": True, "runner.above_max": "error"}
    few = gap | {"workload.kind": "steady", "workload.max_concurrency": 2, "measure.batch_sizes": [2, 4]}
    assert run_job(tiny_yaml(few), tmp_path / "few", QUIET) is Status.OK
    sizes = read_stream(tmp_path / "few", "sizes")
    assert set(zip(sizes["batch_size"], sizes["mode"], strict=True)) == {
        (2, "graph"),
        (2, "eager"),
        (4, "eager"),
    }
    many = few | {"workload.max_concurrency": 4}
    assert run_job(tiny_yaml(many), tmp_path / "many", QUIET) is Status.FAILED
    error = read_result(tmp_path / "many")["error"]
    assert error["kind"] == "NoUsableGraphError" and "runner.above_max" in error["message"]


def test_costs_of_one_run_make_the_batches_of_two_others_equal(job: Path, tmp_path: Path) -> None:
    overrides = {
        "workload.clock": "costs",
        "workload.costs_path": str(job / "sizes.csv"),
        "measure.enabled": False,
    }
    steps = []
    for name in ("a", "b"):
        assert run_job(tiny_yaml(overrides), tmp_path / name, QUIET) is Status.OK
        columns = ["clock_ms", "phase", "mode", "batch_size", "padded_batch_size", "num_kv_tokens"]
        steps.append(read_stream(tmp_path / name, "steps")[columns])
    assert steps[0].equals(steps[1])


def test_without_room_to_measure_the_bandwidth_there_is_no_roofline_and_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.device.measure_copy_bandwidth", lambda device: None)
    assert run_job(tiny_yaml({"workload.enabled": False}), tmp_path, QUIET) is Status.OK
    assert any("there is no roofline" in warning for warning in read_result(tmp_path)["warnings"])
    sizes = read_stream(tmp_path, "sizes")
    assert sizes[["roofline_ms", "roofline_fraction"]].isna().all(axis=None)
    assert sizes["step_ms_p50"].notna().all()
    assert "nan" not in summary_text(tmp_path)
    write_report(tmp_path, tmp_path / "report.html")


def test_an_eager_job_captures_nothing_and_says_so(tmp_path: Path) -> None:
    assert run_job(tiny_yaml({"runner.kind": "eager"}), tmp_path, QUIET) is Status.OK
    result = read_result(tmp_path)
    assert (result["parity"]["verified"], result["parity"]["num_cases"]) == (True, 0)
    assert "parity: no graphs, nothing to prove" in summary_text(tmp_path)
    assert result["graph_backend"] == "none"
    assert result["workload"]["mode_shares"] == {"eager": 1.0}


def test_result_json_is_plain_json_without_nan(job: Path) -> None:
    json.loads(
        (job / "result.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} in result.json")
    )
