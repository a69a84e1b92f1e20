from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from harness.experiment import run_job
from harness.progress import Progress
from harness.record import STREAMS, Status
from harness.record_reader import read_bench_serve, read_result, read_stream
from runners.attention.torch_backend import TorchAttentionBackend
from runners.forward_batch import ForwardMode
from tests.harness.tiny import tiny_yaml

QUIET = Progress(quiet=True)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    job_dir = tmp_path_factory.mktemp("job")
    assert run_job(tiny_yaml(), job_dir, QUIET) is Status.OK
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
    bench = read_bench_serve(job)
    assert bench is not None and bench["graph_backend"] == "emulated"


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


def test_a_job_over_its_time_limit_ends_with_status_timeout_and_keeps_its_rows(tmp_path: Path) -> None:
    config = tiny_yaml({"job.timeout_s": 2.0, "measure.min_samples": 10_000, "measure.timeout_s": 60.0})
    assert run_job(config, tmp_path, QUIET) is Status.TIMEOUT
    assert "job.timeout_s=2" in read_result(tmp_path)["error"]["message"]
    assert len(read_stream(tmp_path, "capture")) == 2


@pytest.mark.parametrize("strategy", ["exact", "max", "cheapest", "split"])
def test_every_padding_strategy_runs_end_to_end(tmp_path: Path, strategy: str) -> None:
    assert run_job(tiny_yaml({"padding.strategy": strategy}), tmp_path, QUIET) is Status.OK
    assert read_result(tmp_path)["parity"]["verified"] is True


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


def test_an_eager_job_captures_nothing_and_says_so(tmp_path: Path) -> None:
    assert run_job(tiny_yaml({"runner.kind": "eager"}), tmp_path, QUIET) is Status.OK
    result = read_result(tmp_path)
    assert result["graph_backend"] == "none"
    assert result["workload"]["mode_shares"] == {"eager": 1.0}


def test_result_json_is_plain_json_without_nan(job: Path) -> None:
    json.loads(
        (job / "result.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} in result.json")
    )
