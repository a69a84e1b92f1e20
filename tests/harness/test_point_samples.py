"""Which samples of a point count, and what its row says of the others."""

from __future__ import annotations

from harness.point_samples import PointSamples, SweepPoint
from harness.step_timer import StepTiming
from harness.telemetry import Reading
from runners.padding import StepPlan


def samples(*step_ms_and_preempted: tuple[float, bool | None]) -> PointSamples:
    point = PointSamples(SweepPoint(2, 24, StepPlan("graph", (4,), "forced")))
    for index, (step_ms, preempted) in enumerate(step_ms_and_preempted):
        point.add([StepTiming(10.0, 0.5, step_ms, 10.0, preempted)], index % 2, Reading())
    return point


def test_samples_in_which_another_process_took_the_cpu_are_left_out_and_counted() -> None:
    row = samples(*[(1.0, False)] * 8, *[(50.0, True)] * 20).row(0.1)
    assert (row["step_ms_p50"], row["step_ms_p99"], row["rel_std"]) == (1.0, 1.0, 0.0)
    assert (row["num_samples"], row["num_discarded"]) == (8, 20)
    assert row["round_std"] == 0.0 and row["unmet_condition"] is None


def test_too_few_undisturbed_samples_let_all_count_and_say_so() -> None:
    row = samples(*[(1.0, False)] * 7, *[(50.0, True)] * 20).row(0.1)
    assert row["step_ms_p50"] == 50.0
    assert (row["num_samples"], row["num_discarded"]) == (27, 0)
    assert row["unmet_condition"] == "other processes took the CPU in 20 of 27 samples"


def test_on_a_gpu_no_sample_is_disturbed_by_the_host() -> None:
    row = samples(*[(1.0, None)] * 4, *[(3.0, None)] * 4).row(0.1)
    assert (row["step_ms_p50"], row["num_samples"], row["num_discarded"]) == (2.0, 8, 0)


def test_all_samples_are_kept_raw_with_their_round_and_their_disturbance() -> None:
    point = samples((1.0, False), (50.0, True))
    row = point.row(0.1) | {"graph_backend": "emulated", "overlap": False}
    raw = point.raw(row)
    assert [(one.get("round"), one.get("preempted"), one["timing"]) for one in raw] == [
        (0, False, "isolated"),
        (1, True, "isolated"),
        (None, None, "back_to_back"),
    ]
