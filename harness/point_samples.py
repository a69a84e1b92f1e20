"""What the size sweep measured of one point: its samples, over the rounds, and the row made of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.stats import percentile, rel_iqr, rel_std, undisturbed
from harness.step_timer import StepTiming
from harness.telemetry import Reading, medians

if TYPE_CHECKING:
    from runners.padding import StepPlan


@dataclass(frozen=True)
class SweepPoint:
    """One row of `sizes.csv` to be measured."""

    batch_size: int
    context_len: int
    plan: StepPlan


@dataclass
class PointSamples:
    """The samples of a point and what was noted beside them.

    On a CPU, samples during which another process took it are left out of the figures, as long as enough
    others remain.
    """

    point: SweepPoint
    timings: list[StepTiming] = field(default_factory=list)
    #: The round of each timing.
    rounds: list[int] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    throttle_reasons: set[str] = field(default_factory=set)
    num_discarded: int = 0
    back_to_back_ms: float | None = None
    energy_mj_per_token: float | None = None
    num_other_processes: int | None = None
    _unmet: list[str] = field(default_factory=list)

    def add(self, block: list[StepTiming], index: int, reading: Reading) -> None:
        """Add the samples of round `index` that end with a look at the card."""
        self.timings += block
        self.rounds += [index] * len(block)
        self.readings.append(reading)

    def note_unmet(self, index: int, num_rounds: int, *conditions: str | None) -> None:
        """Note the conditions that round `index` did not meet."""
        name = f"round {index + 1}: " if num_rounds > 1 else ""
        self._unmet += [name + condition for condition in conditions if condition]

    def _counted(self) -> list[int]:
        return undisturbed([timing.preempted for timing in self.timings])

    def _conditions(self) -> str | None:
        """The unmet conditions, and that disturbed samples had to be counted."""
        num_disturbed = sum(bool(timing.preempted) for timing in self.timings)
        conditions = list(self._unmet)
        if num_disturbed and len(self._counted()) == len(self.timings):
            conditions.append(
                f"other processes took the CPU in {num_disturbed} of {len(self.timings)} samples"
            )
        return "; ".join(conditions) or None

    def row(self, floor_ms: float | None) -> dict[str, Any]:
        """Return the columns of `sizes.csv` that the samples tell, and the point's own."""
        point = self.point
        return {
            "batch_size": point.batch_size,
            "padded_batch_size": point.plan.padded_batch_size(point.batch_size),
            "mode": point.plan.mode,
            "context_len": point.context_len,
            "num_kv_tokens": point.batch_size * point.context_len,
            "num_samples": len(self._counted()),
            "num_discarded": self.num_discarded + len(self.timings) - len(self._counted()),
            "unmet_condition": self._conditions(),
            "roofline_ms": floor_ms,
            "back_to_back_ms": self.back_to_back_ms,
            "throttle_reasons": " ".join(sorted(self.throttle_reasons)) or None,
            "energy_mj_per_token": self.energy_mj_per_token,
            "num_other_processes": self.num_other_processes,
            **medians(self.readings),
            **self._statistics(floor_ms),
        }

    def _statistics(self, floor_ms: float | None) -> dict[str, float | None]:
        """Summarise the samples; everything is None where every block was discarded."""
        counted = [self.timings[index] for index in self._counted()]
        step_ms = [timing.step_ms for timing in counted]
        replay_ms = [timing.replay_ms for timing in counted]
        p50 = percentile(step_ms, 50)
        return {
            "host_prepare_us_p50": percentile([timing.host_prepare_us for timing in counted], 50),
            "host_exposed_us_p50": percentile([timing.host_exposed_us for timing in counted], 50),
            "replay_ms_p50": percentile(replay_ms, 50),
            "replay_rel_std": rel_std(replay_ms),
            "replay_round_std": self._round_std("replay_ms"),
            "step_ms_p50": p50,
            "step_ms_p99": percentile(step_ms, 99),
            "rel_std": rel_std(step_ms),
            "rel_iqr": rel_iqr(step_ms),
            "round_std": self._round_std("step_ms"),
            "roofline_fraction": None if p50 is None or floor_ms is None else floor_ms / p50,
        }

    def _round_std(self, name: str) -> float | None:
        """Standard deviation of the rounds' medians over their mean; None with one round."""
        by_round: dict[int, list[float]] = {}
        for index in self._counted():
            by_round.setdefault(self.rounds[index], []).append(getattr(self.timings[index], name))
        medians_ms = [float(np.median(values)) for values in by_round.values()]
        return float(np.std(medians_ms, ddof=1) / np.mean(medians_ms)) if len(medians_ms) > 1 else None

    def raw(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the rows of `samples.parquet`: each step, and the mean of the back-to-back ones."""
        names = ("batch_size", "padded_batch_size", "mode", "graph_backend", "context_len")
        point = {name: row[name] for name in names}
        kind = "overlapped" if row["overlap"] else "isolated"
        steps = [
            {**point, "timing": kind, "sample": sample, "round": index, **asdict(timing)}
            for sample, (index, timing) in enumerate(zip(self.rounds, self.timings, strict=True))
        ]
        in_a_row = {"timing": "back_to_back", "sample": 0, "step_ms": self.back_to_back_ms}
        return [*steps, {**point, **in_a_row}]
