"""What uneven batches cost: one long request among short ones, and few requests on a large graph.

The size sweep's requests are alike. A decode kernel whose programs each serve one request takes longer for
the longest of them, which no sum of KV tokens tells; see `harness.planner.excess`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.probe import ProbeRequests
from harness.size_sweep import fitting_requests
from harness.step_timer import StepTimer
from harness.telemetry import Telemetry
from runners.padding import StepPlan

if TYPE_CHECKING:
    from harness.schema import MeasureConfig
    from harness.step_timer import StepTiming
    from runners.forward_batch import ForwardBatch
    from runners.model_runner import ModelRunner

#: Tokens of the other requests at most.
_SHORT_LEN = 512
#: A batch of the size over each of these is measured on the graph of a size.
_SHARES = (2, 8)
_NUM_WARMUP = 2


@dataclass(frozen=True)
class RaggedPoint:
    """A row of `ragged.csv` to be measured."""

    batch_size: int
    plan: StepPlan
    place: str
    context_len: int
    longest_len: int

    @property
    def num_kv_tokens(self) -> int:
        if self.place == "padded":
            return self.batch_size * self.longest_len
        return (self.batch_size - 1) * self.context_len + self.longest_len


class RaggedSweep:
    """Measures every point and hands each row to `on_row`. Without graphs, or Inductor's, eager steps only."""

    def __init__(self, runner: ModelRunner, config: MeasureConfig, seed: int) -> None:
        self._runner, self._config, self._seed = runner, config, seed
        self._timer = StepTimer(runner)
        self._telemetry = Telemetry.of(runner.device)
        graphs = runner.graph_runner
        has_graphs = graphs is not None and graphs.graph_backend != "inductor"
        self._capture_bs = list(graphs.capture_bs) if graphs is not None and has_graphs else []

    def points(self) -> list[RaggedPoint]:
        """List what will be measured; what the pool does not hold is left out."""
        return [point for length in self._config.longest_lens for point in self._points(length)]

    def _points(self, longest_len: int) -> Iterator[RaggedPoint]:
        short_len = min(_SHORT_LEN, max(1, longest_len // 4))
        room = self._room(short_len) - -(-longest_len // short_len)
        eager = [(size, StepPlan("eager", (), "forced")) for size in self._config.eager_batch_sizes]
        graphs = [(size, StepPlan("graph", (size,), "forced")) for size in self._capture_bs]
        for size, plan in [*graphs, *eager]:
            if 2 <= size <= room:
                for place in ("first", "last"):
                    yield RaggedPoint(size, plan, place, short_len, longest_len)
        for size, plan in graphs:
            for batch_size in sorted({max(1, size // share) for share in _SHARES}):
                if batch_size < size and batch_size <= self._room(longest_len):
                    yield RaggedPoint(batch_size, plan, "padded", longest_len, longest_len)

    def _room(self, length: int) -> int:
        config = self._runner.config
        return fitting_requests(config.num_kv_pages, config.page_size, length)

    def run(self, on_row: Callable[[dict[str, Any]], None]) -> None:
        """Measure all points, those of one long length together."""
        for longest_len in self._config.longest_lens:
            points = list(self._points(longest_len))
            for is_padded in (False, True):
                here = [point for point in points if (point.place == "padded") == is_padded]
                if here:
                    self._measure_all(here, on_row)

    def _measure_all(self, points: list[RaggedPoint], on_row: Callable[[dict[str, Any]], None]) -> None:
        largest = max(point.batch_size for point in points)
        lengths = [*[points[0].context_len] * (largest - 1), points[0].longest_len]
        with ProbeRequests(self._runner, lengths, self._seed) as probe:
            for point in points:
                others = list(range(point.batch_size - 1))
                rows = [largest - 1, *others] if point.place == "first" else [*others, largest - 1]
                on_row(self._row(point, self._time(probe.decode_of(rows), point.plan)))

    def _time(self, batch: ForwardBatch, plan: StepPlan) -> list[StepTiming]:
        """Time steps one by one; none is kept if the card throttles."""
        timings = [self._timer.isolated(batch, plan) for _ in range(_NUM_WARMUP + self._config.min_samples)]
        return [] if self._telemetry.read().is_throttled else timings[_NUM_WARMUP:]

    def _row(self, point: RaggedPoint, timings: list[StepTiming]) -> dict[str, Any]:
        replay_ms = np.array([timing.replay_ms for timing in timings])
        step_ms = np.array([timing.step_ms for timing in timings])
        return {
            "batch_size": point.batch_size,
            "padded_batch_size": point.plan.padded_batch_size(point.batch_size),
            "mode": point.plan.mode,
            "graph_backend": "none" if point.plan.mode == "eager" else self._runner.graph_backend,
            "place": point.place,
            "context_len": point.context_len,
            "longest_len": point.longest_len,
            "num_kv_tokens": point.num_kv_tokens,
            "num_samples": len(timings),
            "replay_ms_p50": float(np.median(replay_ms)) if timings else None,
            "step_ms_p50": float(np.median(step_ms)) if timings else None,
            "rel_std": float(replay_ms.std() / replay_ms.mean()) if timings else None,
        }
