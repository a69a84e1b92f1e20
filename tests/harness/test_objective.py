"""What a sweeper that searches is told of a job."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.experiment import run_job
from harness.objective import FIGURES, check_objective, objective_value
from harness.progress import Progress
from harness.record import Status
from harness.schema import load_config
from tests.harness.job_folder import write_job
from tests.harness.tiny import tiny_yaml


def test_every_figure_but_memory_is_there_after_a_job_without_a_gpu(tmp_path: Path) -> None:
    assert run_job(tiny_yaml({"measure.enabled": True}), tmp_path, Progress(quiet=True)) is Status.OK
    values = objective_value(tmp_path, list(FIGURES))
    assert isinstance(values, list)
    missing = {name for name, value in zip(FIGURES, values, strict=True) if math.isnan(value)}
    assert missing == {"capture.graph_mib"}


def test_the_figures_are_those_of_the_record(tmp_path: Path) -> None:
    write_job(tmp_path)
    names = ["summary.median_tpot_ms", "sizes.largest_step_ms", "capture.graph_mib", "capture.num_sizes"]
    graph_mib = (4096 * (1 + 2 + 4 + 8) + 4 * 512) / 1024**2
    assert objective_value(tmp_path, names) == [4.25, 1.5, graph_mib, 4.0]
    assert objective_value(tmp_path, names[:1]) == 4.25


def test_a_job_that_failed_has_no_value(tmp_path: Path) -> None:
    write_job(tmp_path, status=Status.PARITY_FAILED)
    value = objective_value(tmp_path, ["summary.median_tpot_ms"])
    assert isinstance(value, float) and math.isnan(value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"job.objective": ["median_tpot_ms"]}, r"no such figure; did you mean summary\.median_tpot_ms\?"),
        ({"job.objective": ["capture.graph_mb"]}, r"did you mean capture\.graph_mib\?"),
        (
            {"job.objective": ["summary.p99_itl_ms"], "workload.enabled": False},
            r"is not measured with workload\.enabled=false",
        ),
    ],
)
def test_a_figure_that_will_not_be_there_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_objective(load_config(tiny_yaml(changes)))
