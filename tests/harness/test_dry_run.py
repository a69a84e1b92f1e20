"""A dry run says what each job would be, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.__main__ import main
from harness.compose import compose
from harness.config_hash import expected_hash
from harness.estimate import RECORDS, estimate
from harness.memory import kv_bytes_per_token
from harness.model_size import model_size
from harness.nvidia import Gpu
from harness.record import JobRecord, Status
from harness.record_reader import read_result
from harness.schema import load_config
from harness.sweep import Point, SweepFolder, row_of
from tests.harness.test_cli import in_an_empty_folder
from tests.harness.tiny import tiny_config, tiny_runner

__all__ = ["in_an_empty_folder"]
ROOT = Path(__file__).parents[2]
DRY = "sweep.dry_run=true"


def test_every_point_is_told_with_its_graphs_and_the_reason_of_a_refusal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lists = "capture.sizes=[1,4],[1,2,4],[1,4]"
    line = ["-m", "capture=explicit", "device=cpu", "runner.max_batch_size=4", "seed=0,-1", lists, DRY]
    assert main(line) == 2
    printed = capsys.readouterr().out
    assert "2 graphs (1,4); seconds: unknown; memory: " in printed
    assert "3 graphs (1,2,4)" in printed
    assert printed.count("refused: seed=-1: must be at least 0") == 3
    assert "equal to a point above" in printed
    assert "6 point(s): 2 would run, 0 finished, 1 equal, 3 refused; 5 graphs to capture" in printed
    assert not list(Path().iterdir())


def test_a_single_job_can_be_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runner=eager", "device=cpu", DRY]) == 0
    printed = capsys.readouterr().out
    assert "no graphs; seconds: unknown" in printed
    assert "seconds: no record of this processor to scale" in printed
    assert not list(Path().iterdir())


def test_what_a_resumed_sweep_has_finished_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["-m", "seed=0,1", "device=cpu", "sweep.id=night"]
    sweep = SweepFolder(Path("outputs/night"))
    sweep.open(resume=False)
    config = load_config(compose(["device=cpu"]))
    (sweep.folder / "0").mkdir()
    JobRecord(sweep.folder / "0").update(status=Status.OK)
    sweep.put(
        sweep.folder / "0", Point(0, expected_hash(config), "", row_of(sweep.folder / "0", "seed=0", 12.0))
    )
    before = sorted(Path().rglob("*"))
    assert main([*line, "sweep.resume=true", DRY]) == 0
    printed = capsys.readouterr().out
    assert "finished: would not run again" in printed
    assert "2 point(s): 1 would run, 1 finished" in printed
    assert "the 1 finished job(s) of this sweep took 12 s each (median)" in printed
    assert sorted(Path().rglob("*")) == before
    (sweep.folder / "0" / "result.json").write_text("{")
    assert main([*line, "sweep.resume=true", DRY]) == 0
    printed = capsys.readouterr().out
    assert "night/0/result.json is damaged" in printed and "2 point(s): 2 would run" in printed
    (sweep.folder / "0" / "point.json").write_text("{")
    assert main([*line, "sweep.resume=true", DRY]) == 2
    assert "night/0/point.json is damaged" in (told := capsys.readouterr().err) and "compose" not in told


def test_a_dry_run_imports_no_torch() -> None:
    script = f"""
import sys
from harness.__main__ import main
from harness.compose import compose
from harness.config_hash import expected_hash
main(["-m", "seed=0,1", "{DRY}"])
sys.exit("torch" in sys.modules)
"""
    assert (
        subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": str(ROOT)}, check=False).returncode
        == 0
    )


def test_the_memory_is_what_the_job_will_budget() -> None:
    config = tiny_config()
    size = model_size(config)
    with tiny_runner() as runner:
        assert size.weight_bytes == pytest.approx(runner.loaded.weight_bytes, rel=0.01)
        assert size.vocab_size == runner.loaded.vocab_size
        assert size.kv_bytes_per_token == kv_bytes_per_token(runner.loaded, runner.kv.dtype)


@pytest.mark.parametrize("name", ["qwen3_0_6b", "qwen3_8b"])
def test_a_recorded_model_is_counted_within_a_percent(name: str) -> None:
    recorded = read_result(RECORDS / "h200" / name)
    config = tiny_config()
    config.model.config, config.model.dtype = recorded["config"]["model"]["config"], "bfloat16"
    assert model_size(config).weight_bytes == pytest.approx(recorded["model"]["weight_bytes"], rel=0.01)


def test_seconds_are_scaled_from_a_record_of_the_same_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = read_result(RECORDS / "h200" / "qwen3_0_6b")
    config = tiny_config()
    config.model.name, config.workload.enabled = "qwen3_0_6b", False
    config.runner.max_batch_size, config.capture.policy, config.capture.sizes = (
        256,
        "explicit",
        recorded["capture"]["sizes"],
    )
    config.measure.batch_sizes, config.measure.context_lens, config.measure.timeout_s = (
        [1, 2, 4, 8, 16],
        [512],
        0.8,
    )
    gpu = Gpu("NVIDIA H200", 1, 0, (9, 0))
    monkeypatch.setattr("harness.estimate.visible_gpus", lambda: [gpu])
    config.device = "cuda"
    found = estimate(config)
    timings = recorded["timings"]
    spent = sum(timings[f"{phase}_s"] for phase in ("validate", "build", "capture", "parity", "size_sweep"))
    assert found.seconds == pytest.approx(spent)
    assert "docs/results/h200/qwen3_0_6b" in found.seconds_ground
