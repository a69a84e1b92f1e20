"""How often `compare` is right: two runs of the same thing, and a planted slow-down.

    python -m pytest tests/bench/bench_compare.py -s

It prints a line a series: of two runs of the same thing, what percentage comes out SAME, and
where the second run is 5% slower, what percentage comes out SLOW. Every run has an offset of its own
(0.5%), as real ones do. The second benchmark measures the same real step twice, 100 times over: with CUDA
it is judged by the replay, which a busy host leaves alone, and shown by the step; without, by the step. Where
the samples were disturbed (another process took the CPU; the card throttled or was shared) it says so and
judges nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from harness.probe import ProbeRequests
from harness.report.bootstrap import MedianError, median_error
from harness.report.verdict import MAX_BLUR, RERUN_MARGIN, Verdict, judge, rerun_error
from harness.stats import undisturbed
from harness.step_timer import StepTimer, StepTiming
from harness.telemetry import Telemetry
from runners.padding import StepPlan
from tests.harness.tiny import tiny_runner

Floats = NDArray[np.float64]
NUM_PAIRS = 200
RUN_OFFSET = 0.005
NUM_REAL_PAIRS, NUM_REAL_SAMPLES = 100, 40
#: On a GPU the graph must take long beside its launch, which is within its replay when the device idles.
NUM_LAYERS = {"cpu": 1, "cuda": 16}
#: Above this share of disturbed samples a machine is not the same from one run to the next.
MAX_BUSY = 0.02

RNG = np.random.default_rng(7)


def white(num: int) -> Floats:
    return RNG.normal(size=num)


def correlated(num: int, correlation: float) -> Floats:
    series = white(num)
    for index in range(1, num):
        series[index] = correlation * series[index - 1] + (1 - correlation**2) ** 0.5 * series[index]
    return series


#: Name → samples on the log scale. The last are what a stopping rule lets pass (5% of noise).
SERIES: dict[str, Callable[[int], Floats]] = {
    "quiet, 1%": lambda n: 0.01 * white(n),
    "correlated 0.5, 2%": lambda n: 0.02 * correlated(n, 0.5),
    "correlated 0.9, 2%": lambda n: 0.02 * correlated(n, 0.9),
    "drift of up to 3%": lambda n: 0.01 * white(n) + 0.03 * RNG.normal() * np.linspace(-0.5, 0.5, n),
    "random walk of 2%": lambda n: 0.01 * white(n) + 0.02 * np.cumsum(white(n)) / n**0.5,
    "a step of 3%": lambda n: 0.01 * white(n) + 0.03 * (np.arange(n) > RNG.uniform(0, n)),
    "alternating, 2%": lambda n: 0.003 * white(n) + 0.02 * (np.arange(n) % 2),
    "heavy tail": lambda n: 0.01 * white(n) + 0.01 * RNG.pareto(1.5, n),
    "two levels, 5%": lambda n: 0.003 * white(n) + 0.05 * (RNG.random(n) < 0.5),
    "coarse clock, 1%": lambda n: np.round(0.01 * white(n), 2),
    "noisy, 5%": lambda n: 0.05 * white(n),
}


def run_of(series: Callable[[int], Floats], num_samples: int, slow_down: float = 0.0) -> MedianError:
    offset = RUN_OFFSET * RNG.normal() + np.log1p(slow_down)
    return median_error(4.0 * np.exp(series(num_samples) + offset))


def percentages(series: Callable[[int], Floats], num_samples: int, slow_down: float) -> dict[Verdict, float]:
    counts: Counter[Verdict] = Counter()
    for _ in range(NUM_PAIRS):
        pair = run_of(series, num_samples), run_of(series, num_samples, slow_down)
        counts[judge(*pair, rerun_error([[pair]], RERUN_MARGIN), MAX_BLUR).verdict] += 1
    return {verdict: 100 * counts[verdict] / NUM_PAIRS for verdict in Verdict}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_samples", [64, 200])
def test_two_runs_of_the_same_thing_are_the_same(num_samples: int) -> None:
    print(
        f"\n{num_samples} samples a run      same thing: SAME AMBIGUOUS SLOW FAST    5% slower: SLOW AMBIGUOUS SAME"
    )
    same: dict[str, float] = {}
    for name, series in SERIES.items():
        alike, planted = (percentages(series, num_samples, slow_down) for slow_down in (0.0, 0.05))
        same[name] = alike[Verdict.SAME]
        shown = [alike[v] for v in (Verdict.SAME, Verdict.AMBIGUOUS, Verdict.SLOW, Verdict.FAST)]
        shown += [planted[v] for v in (Verdict.SLOW, Verdict.AMBIGUOUS, Verdict.SAME)]
        print(f"{name:<28}" + "".join(f"{value:9.1f}" for value in shown))
        if name.startswith("quiet"):
            assert planted[Verdict.SLOW] >= 95
        assert alike[Verdict.SLOW] + alike[Verdict.FAST] <= 2
    assert np.mean(list(same.values())) >= 95
    assert min(same.values()) >= 92


@pytest.mark.timeout(900)
def test_real_runs_of_the_same_step_are_the_same() -> None:
    """100 times: the same tiny step measured twice, in this process."""
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    runs = _real_runs(device)
    share = float(np.mean([run.disturbed_share for run in runs]))
    counts = _verdicts([run.step for run in runs])
    print(f"\n{NUM_REAL_PAIRS} pairs of real runs, {share:.1%} of the samples disturbed")
    print(f"by step:   {_shown(counts)}; median {np.median([run.step.median for run in runs]):.3f} ms")
    if device.type == "cuda":
        counts = _verdicts([run.replay for run in runs])
        print(f"by replay: {_shown(counts)}; median {np.median([run.replay.median for run in runs]):.3f} ms")
    if share > MAX_BUSY:
        pytest.skip(
            f"{share:.1%} of the samples were disturbed: this machine is not quiet, so nothing is judged"
        )
    assert counts[Verdict.SAME] >= 95
    assert counts[Verdict.SLOW] + counts[Verdict.FAST] <= 2


@dataclass(frozen=True)
class RealRun:
    """The medians of a run, and in which share of its samples another process took the CPU or the card."""

    step: MedianError
    replay: MedianError
    disturbed_share: float


def _real_runs(device: torch.device) -> list[RealRun]:
    overrides = {"model.config.num_hidden_layers": NUM_LAYERS[device.type]}
    plan, telemetry = StepPlan("graph", (4,), "forced"), Telemetry.of(device)
    with tiny_runner(overrides, str(device)) as runner, ProbeRequests(runner, [24] * 4, seed=0) as probe:
        timer, batch = StepTimer(runner), probe.decode_batch(4)
        for _ in range(200):
            timer.isolated(batch, plan)
        runs = []
        for _ in range(2 * NUM_REAL_PAIRS):
            timings = [timer.isolated(batch, plan) for _ in range(NUM_REAL_SAMPLES)]
            is_card_disturbed = telemetry.read().is_throttled or telemetry.num_other_processes()
            runs.append(_run_of(timings, bool(is_card_disturbed)))
    return runs


def _run_of(timings: list[StepTiming], is_card_disturbed: bool) -> RealRun:
    disturbed = [timing.preempted for timing in timings]
    counted = [timings[index] for index in undisturbed(disturbed)]
    return RealRun(
        step=median_error(np.array([timing.step_ms for timing in counted])),
        replay=median_error(np.array([timing.replay_ms for timing in counted])),
        disturbed_share=1.0 if is_card_disturbed else sum(map(bool, disturbed)) / len(disturbed),
    )


def _verdicts(runs: list[MedianError]) -> Counter[Verdict]:
    pairs = zip(runs[::2], runs[1::2], strict=True)
    return Counter(judge(a, b, rerun_error([[(a, b)]], RERUN_MARGIN), MAX_BLUR).verdict for a, b in pairs)


def _shown(counts: Counter[Verdict]) -> str:
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict)
