"""Jobs with torch.compile: what the record says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness import parity
from harness.experiment import run_job
from harness.progress import Progress
from harness.record import Status
from harness.record_reader import read_result, read_stream
from harness.summary import summary_text
from runners import compilation
from runners.compile_counts import CompileCounts
from tests.harness.tiny import tiny_yaml

QUIET = Progress(quiet=True)
SIZES = [2, 4]


@pytest.fixture(scope="module", autouse=True)
def traced_only() -> Any:
    """Run what dynamo traced as it is: what is recorded does not depend on the code generator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "code_generator", lambda mode: {"backend": "eager"})
        yield


def run(job_dir: Path, **overrides: Any) -> dict[str, Any]:
    settings = {"compile.scope": "layer", **{name.replace("__", "."): v for name, v in overrides.items()}}
    assert run_job(tiny_yaml(settings), job_dir, QUIET) is Status.OK
    return read_result(job_dir)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    job_dir = tmp_path_factory.mktemp("compiled")
    run(job_dir, compile__mode="default", compile__max_bs=2)
    return job_dir


def test_each_captured_size_says_whether_and_how_long_it_was_compiled(job: Path) -> None:
    capture = read_stream(job, "capture").set_index("capture_size")
    assert capture["compiled"].to_dict() == {4: False, 2: True}
    assert capture["compile_s"][2] > 0 and capture["compile_s"].isna()[4]


def test_each_timed_size_says_whether_it_ran_compiled_code(job: Path) -> None:
    sizes = read_stream(job, "sizes")
    compiled = {(row.mode, row.padded_batch_size): row.compiled for row in sizes.itertuples()}
    assert compiled[("graph", 2)] and not compiled[("graph", 4)]
    assert not any(is_compiled for (mode, _), is_compiled in compiled.items() if mode == "eager")


def test_the_counters_stand_in_the_record_and_in_the_summary(job: Path) -> None:
    result = read_result(job)
    assert result["parity"]["verified"] and result["parity"]["num_bitwise"] == result["parity"]["num_cases"]
    counts = CompileCounts(**result["capture"]["compile_counts"])
    assert counts == CompileCounts(num_graphs=1) and result["warnings"] == []
    text = summary_text(job)
    assert (
        "torch.compile: 1 graphs in warm-up; 0 recompiles, 0 graph breaks, 0 recompile limit hits, "
        "0 uncompiled layers" in text
    )
    lines = text.splitlines()
    head = lines.index(next(line for line in lines if line.startswith("Capture sizes")))
    assert lines[head + 2].split()[:3] == ["capture", "compile", "s"]


def test_a_job_without_compilation_counts_none(tmp_path: Path) -> None:
    result = run(tmp_path, measure__enabled=False, workload__enabled=False)
    assert result["capture"]["compile_counts"] is None
    assert "torch.compile" not in summary_text(tmp_path)


def test_a_recompile_in_any_phase_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = parity.check_parity

    def changed_model(runner: Any, *args: Any) -> Any:
        runner.model.model.layers[1].input_layernorm.variance_epsilon *= 2
        return check(runner, *args)

    monkeypatch.setattr(parity, "check_parity", changed_model)
    result = run(tmp_path, compile__mode="default", measure__enabled=False, workload__enabled=False)
    assert result["capture"]["sizes"] == SIZES
    assert result["capture"]["compile_counts"]["num_recompiles"] == 2
    (warning,) = result["warnings"]
    assert "2 recompiles after warm-up" in warning


def test_reduce_overhead_runs_compiled_steps_on_inductor_and_never_a_graph_of_ours(tmp_path: Path) -> None:
    result = run(tmp_path, compile__mode="reduce_overhead")
    assert result["graph_backend"] == "inductor" and result["parity"]["verified"]
    capture, sizes, steps = (read_stream(tmp_path, name) for name in ("capture", "sizes", "steps"))
    assert set(capture["graph_backend"]) == {"inductor"} and capture["capture_s"].isna().all()
    assert set(zip(sizes["mode"], sizes["graph_backend"], sizes["compiled"], strict=True)) == {
        ("compiled", "inductor", True),
        ("eager", "none", False),
    }
    decode = steps[steps["phase"] == "decode"]
    assert set(decode["mode"]) <= {"compiled", "eager"} and set(decode["num_graphs"]) == {0}


def test_without_a_compiler_a_job_ends_before_a_weight_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runners.models.loader.load_model", lambda *_: pytest.fail("a weight was loaded"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    config = tiny_yaml({"compile.mode": "default", "device": "cpu"})
    assert run_job(config, tmp_path, QUIET) is Status.INVALID_CONFIG
    message = read_result(tmp_path)["error"]["message"]
    assert message.startswith(
        "compile.mode=default: builds kernels for the CPU, and there is no C++ compiler"
    )
    assert "apt install g++" in message and "write compile=none" in message
