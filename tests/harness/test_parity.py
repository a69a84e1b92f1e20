"""What the proof of a job must find: a fault of padding that a full batch does not show."""

from __future__ import annotations

import torch

from harness.parity import check_parity
from harness.schema import ParityConfig
from runners.forward_batch import ForwardBatch
from runners.model_runner import ModelRunner
from tests.runners.tiny_runner import tiny_config, tiny_model, tiny_runner


class CentresRows(ModelRunner):
    """As a step that scales by the largest value of its batch: every row depends on all rows."""

    def compute_logits(self, batch: ForwardBatch, *compiled: object) -> torch.Tensor:
        computed = super().compute_logits(batch)
        return computed - computed.mean(dim=0, keepdim=True)


def failed_sizes(runner: ModelRunner) -> dict[int, str]:
    """Batch size → why its proof failed."""
    report = check_parity(runner, ParityConfig(), seed=0)
    assert {case.batch_size for case in report.cases} == {1, 2, 3, 4, 7, 8}
    return {case.batch_size: case.reason for case in report.cases if not case.passed}


def test_a_sound_runner_is_verified() -> None:
    with tiny_runner() as runner:
        assert failed_sizes(runner) == {}


def test_padding_rows_that_reach_real_rows_through_a_reduction_over_the_batch_are_found() -> None:
    with CentresRows(tiny_model(), tiny_config()) as runner:
        failed = failed_sizes(runner)
    assert set(failed) == {3, 7}, "those that are padded"
    assert all("replay and eager unpadded differ" in reason for reason in failed.values())
