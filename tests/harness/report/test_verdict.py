"""SAME, FAST, SLOW and AMBIGUOUS on medians of known uncertainty."""

from __future__ import annotations

import math

import pytest

from harness.report.bootstrap import MedianError, pooled
from harness.report.verdict import (
    MAX_BLUR,
    RERUN_MARGIN,
    Judgement,
    Verdict,
    judge,
    repeat_error,
    rerun_error,
)

ASSUMED = rerun_error([], RERUN_MARGIN)


def quiet(median: float, log_error: float = 0.002) -> MedianError:
    return MedianError(median, log_error, num_blocks=40)


def judged(b: MedianError, rerun: float = ASSUMED) -> Judgement:
    return judge(quiet(4.0), b, rerun, MAX_BLUR)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [(0.0, "SAME"), (0.015, "SAME"), (-0.015, "SAME"), (0.05, "SLOW"), (-0.05, "FAST"), (0.03, "AMBIGUOUS")],
)
def test_a_change_is_judged_by_what_a_re_run_differs_by(change: float, verdict: str) -> None:
    assert judged(quiet(4.0 * (1 + change))).verdict == verdict


def test_the_interval_holds_the_change_and_tells_same_from_the_rest() -> None:
    for change in (0.0, 0.02, 0.05, -0.04):
        judgement = judged(quiet(4.0 * (1 + change)))
        assert judgement.low < judgement.change < judgement.high
        assert (judgement.low <= 0 <= judgement.high) == (judgement.verdict is Verdict.SAME)


def test_noise_that_would_hide_a_large_change_is_not_called_the_same() -> None:
    judgement = judged(quiet(4.0, log_error=0.06))
    assert judgement.verdict is Verdict.AMBIGUOUS
    assert judgement.reason == "noise hides 10%"


def test_a_large_change_stands_out_of_noise() -> None:
    assert judged(quiet(8.0, log_error=0.06)).verdict is Verdict.SLOW


def test_a_single_sample_proves_nothing() -> None:
    judgement = judged(MedianError(40.0, math.inf, 1))
    assert judgement.verdict is Verdict.AMBIGUOUS
    assert judgement.reason == "one sample a run"
    assert judgement.blur > 1e6


def test_few_independent_stretches_widen_the_interval() -> None:
    many, few = judged(MedianError(4.0, 0.01, 40)), judged(MedianError(4.0, 0.01, 4))
    assert few.blur > 1.3 * many.blur


def curve(changes: list[float]) -> list[tuple[MedianError, MedianError]]:
    return [(quiet(4.0 + index), quiet((4.0 + index) * (1 + change))) for index, change in enumerate(changes)]


def test_neighbours_that_move_alike_say_nothing_of_noise() -> None:
    assert rerun_error([curve([0.3] * 8)], RERUN_MARGIN) == ASSUMED


def test_a_slow_down_from_one_batch_size_on_is_not_taken_for_noise() -> None:
    assert rerun_error([curve([0.0] * 6 + [0.2] * 6)], RERUN_MARGIN) == ASSUMED


def test_neighbours_that_scatter_show_what_a_re_run_differs_by() -> None:
    scattered = curve([0.08, -0.07, 0.05, -0.09, 0.06, -0.04, 0.08, -0.05])
    assert rerun_error([scattered], RERUN_MARGIN) > 4 * ASSUMED


def test_too_few_neighbours_leave_the_margin() -> None:
    assert rerun_error([curve([0.3, -0.3, 0.3])], RERUN_MARGIN) == ASSUMED


def test_samples_that_scatter_widen_what_a_re_run_may_differ_by() -> None:
    busy = MedianError(4.0, 0.002, 40, spread=0.3)
    assert rerun_error([[(busy, busy)] * 3], RERUN_MARGIN) > 0.1
    calm = MedianError(4.0, 0.002, 40, spread=0.01)
    assert rerun_error([[(calm, calm)] * 3], RERUN_MARGIN) == ASSUMED


def test_a_change_too_small_to_matter_is_the_same_however_sure() -> None:
    sure = MedianError(4.0 * 1.008, 1e-5, 400)
    assert judge(MedianError(4.0, 1e-5, 400), sure, 1e-5, MAX_BLUR).verdict is Verdict.SAME
    assert judge(MedianError(4.0, 1e-5, 400), sure, 1e-5, MAX_BLUR, min_effect=0.005).verdict is Verdict.SLOW


def test_repeats_tell_what_the_sides_differ_by() -> None:
    """Runs that scatter by 3%, three a side: the ratio of the means by 3% · sqrt(2/3)."""
    runs = [[quiet(4.0 * (1 + change)) for change in (-0.03, 0.0, 0.03)]] * 4
    assert repeat_error(runs, (3, 3), RERUN_MARGIN) == pytest.approx(0.03 * math.sqrt(2 / 3), rel=0.01)


def test_without_repeats_or_with_too_few_they_tell_nothing() -> None:
    assert repeat_error([[quiet(4.0)]] * 8, (1, 1), RERUN_MARGIN) is None
    assert repeat_error([[quiet(4.0)] * 2] * 2, (2, 2), RERUN_MARGIN) is None


def test_repeats_that_agree_leave_half_the_margin() -> None:
    assert repeat_error([[quiet(4.0)] * 3] * 4, (3, 3), RERUN_MARGIN) == pytest.approx(ASSUMED / 2)


def test_a_median_of_several_runs_is_surer_by_their_number() -> None:
    runs = [quiet(4.0), quiet(4.4)]
    assert pooled(runs).median == pytest.approx(math.sqrt(4.0 * 4.4))
    assert pooled(runs).log_error == pytest.approx(0.002 / math.sqrt(2))
    assert pooled(runs[:1]) is runs[0]
