"""The experiments for a GPU: each composes for one, is refused with the remedy without one, and tells its cost first."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from harness.__main__ import main
from harness.compose import compose, group_choices
from harness.config_hash import expected_hash
from harness.errors import ConfigError
from harness.estimate import estimate
from harness.experiment import run_job
from harness.nvidia import Gpu, visible_gpus
from harness.progress import Progress
from harness.record import Status
from harness.record_reader import read_result
from harness.schema import Config, check, load_config
from runners.capture_sizes import POLICIES
from tests.harness.test_overlays import SHORT, TINY, overlay, points

NAMES = sorted(name for name in group_choices("experiment") if name.startswith("gpu_"))
SMALL = ["device=cpu", "model=tiny", "model.dtype=float32", "measure.context_lens=[64]"]
#: These compile for minutes.
TOO_LONG = {"gpu_compile_modes"}
CUT = {
    "gpu_capture_lists": ["runner.max_batch_size=16"],
    "gpu_ceiling_feedback": ["parity.enabled=false", "workload.burst_size=4", "workload.output_len=8"],
}


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration is checked, and its cost estimated, as on a machine with one H200."""
    gpu = Gpu("NVIDIA H200", 1, 0, (9, 0))
    for module in ("harness.nvidia", "harness.estimate"):
        monkeypatch.setattr(f"{module}.visible_gpus", lambda: [gpu])


@functools.cache
def configurations(name: str) -> list[Config]:
    """Each point as composed; not to be changed."""
    return [load_config(compose([f"experiment={name}", *point])) for point in points(name)]


def test_there_is_one_for_each_question() -> None:
    assert set(NAMES) == {
        "gpu_capture_lists",
        "gpu_ceiling_feedback",
        "gpu_compile_modes",
        "gpu_padding_strategies",
        "gpu_page_sizes",
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("h200")
def test_every_point_composes_for_a_gpu_and_is_another_one(name: str) -> None:
    configs = configurations(name)
    for config in configs:
        check(config)
        assert (config.device, config.model.name, config.model.dtype) == ("cuda", "qwen3_0_6b", "bfloat16")
    assert len({expected_hash(config) for config in configs}) == len(configs) > 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("h200")
def test_its_comment_says_how_long_it_takes_and_where_that_comes_from(name: str) -> None:
    """And it promises no less than the committed records of an H200 give for the parts that they know."""
    comment = " ".join(line for line in overlay(name).splitlines() if line.startswith("#"))
    told = re.search(rf"-m experiment={name} \(H200: (\d+) min(, estimated)?\)", comment)
    assert told, comment
    assert "Shows" in comment and ("The time is an estimate" if told[2] else "docs/results/h200") in comment
    known = [estimate(config).seconds for config in configurations(name)]
    assert sum(seconds for seconds in known if seconds is not None) <= 60 * int(told[1])


def test_the_lists_are_those_of_all_engines() -> None:
    swept = {point[0].partition("=")[2] for point in points("gpu_capture_lists")}
    assert set(POLICIES) - {"all"} <= swept


@pytest.mark.skipif(bool(visible_gpus()), reason="there is a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_without_a_gpu_it_is_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(ConfigError, match=r"no GPU is visible: write device=cpu \(or auto\)"):
        check(configurations(name)[0])


@pytest.mark.parametrize("name", sorted(TOO_LONG))
def test_a_dry_run_tells_its_points_without_a_gpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["-m", f"experiment={name}", "device=cpu", "sweep.dry_run=true"]) == 0
    number = len(points(name))
    assert f"{number} point(s): {number} would run, 0 finished, 0 equal, 0 refused" in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(set(NAMES) - TOO_LONG))
def test_its_last_point_runs_cut_short_on_a_cpu(name: str, tmp_path: Path) -> None:
    point = [text for text in points(name)[-1] if "burst_size" not in text]
    config = compose([f"experiment={name}", *point, *SMALL, *SHORT, *TINY, *CUT.get(name, [])])
    assert run_job(config, tmp_path, Progress(quiet=True)) is Status.OK, read_result(tmp_path)["error"]
