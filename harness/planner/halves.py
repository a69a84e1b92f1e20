"""Whether at most half of a list's graphs would do as well: a verdict for each engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.planner.honesty import Comparison
    from harness.planner.plan import Judged


def half_of(sizes: tuple[int, ...]) -> int:
    """Graphs that the list beside `sizes` may have; the largest batch always has one."""
    return max(1, len(sizes) // 2)


@dataclass(frozen=True)
class HalfSize:
    """A list in use beside the best one of at most half its graphs, as `plan --default` would make it."""

    engine: Judged
    half: Judged
    #: By how much the half is faster on the windows that it was not fitted on.
    comparison: Comparison | None
    #: Mean step time there of the best list of at most as many graphs, had these windows been known.
    hindsight_step_ms: float | None

    @property
    def max_graphs(self) -> int:
        return half_of(self.engine.sizes)

    @property
    def is_adopted(self) -> bool:
        """False: keep the engine's list, for nothing shows that the half is no slower."""
        return self.reason == "no_slower"

    @property
    def reason(self) -> str:
        """Why: `no_slower`; or else `slower`, `within_noise`, `not_measured`, `too_little_traffic` or `same_list`."""
        if self.half.sizes == self.engine.sizes:
            return "same_list"
        if self.comparison is None or self.comparison.interval is None:
            return "too_little_traffic"
        if not self.comparison.is_measured:
            return "not_measured"
        if self.comparison.is_no_worse:
            return "no_slower"
        return "slower" if self.comparison.is_worse else "within_noise"

    @property
    def regret(self) -> float | None:
        """By how much a step is longer than under the engine's list, as a fraction; None if no step ran."""
        return None if self.comparison is None else max(0.0, -self.comparison.gain)

    @property
    def hindsight_gain(self) -> float | None:
        """By how much that list is faster than the engine's; None if no step ran."""
        if self.hindsight_step_ms is None or not self.engine.step_ms:
            return None
        return 1 - self.hindsight_step_ms / self.engine.step_ms
