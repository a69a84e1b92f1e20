"""The environment that a record tells of."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from harness.cache_flush import last_level_cache_bytes
from harness.device import copy_buffer_bytes, describe_environment, measure_copy_bandwidth, resolve_device
from harness.record import JobRecord
from harness.record_reader import read_result

CPU = torch.device("cpu")


def test_the_environment_names_versions_commit_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/harness", "capture=all"])
    told = describe_environment(CPU)
    assert told["command"] == ["harness", "capture=all"]
    assert told["versions"]["torch"] == torch.__version__
    assert told["git"].keys() == {"commit", "dirty"}
    assert told["driver"] is None and told["device_name"] is None


def test_a_job_of_a_sweep_tells_the_line_that_runs_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- capture=all\n- padding=split\n")
    monkeypatch.setattr(sys, "argv", ["/somewhere/harness/isolation.py", str(tmp_path)])
    assert describe_environment(CPU)["command"] == ["harness", "capture=all", "padding=split"]


def test_a_secret_of_the_command_line_stays_out_of_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["harness", "model.hf_token=hush-hush", "seed=1"])
    with JobRecord(tmp_path) as record:
        record.update(environment=describe_environment(CPU))
    assert read_result(tmp_path)["environment"]["command"] == ["harness", "model.hf_token=***", "seed=1"]


def test_the_last_level_cache_of_this_machine_has_a_size() -> None:
    assert last_level_cache_bytes(CPU) >= 2**18


def test_the_buffers_of_the_copy_leave_half_of_what_is_free_and_outgrow_the_cache() -> None:
    gib, cache = 1 << 30, 50 << 20
    assert copy_buffer_bytes(140 * gib, cache) == 2 * gib
    assert copy_buffer_bytes(1500 << 20, cache) == 375 << 20
    assert copy_buffer_bytes(4 * 4 * cache, cache) == 4 * cache
    assert copy_buffer_bytes(4 * 4 * cache - 4, cache) is None


def test_a_copy_counts_what_it_reads_and_what_it_writes() -> None:
    bandwidth = measure_copy_bandwidth(CPU, min_time_s=0.01)
    assert bandwidth is not None and bandwidth > 1e8


@pytest.mark.parametrize(("name", "index"), [("auto", 0), ("cuda", 0), ("cuda:1", 1)])
def test_the_device_of_a_job_becomes_the_current_one(
    name: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    assert resolve_device(name) == torch.device("cuda", index)
    assert made_current == [torch.device("cuda", index)]
