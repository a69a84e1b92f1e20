"""The cost table of a measured run: what a step takes, and what a capture list takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from harness.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.planner.capture_cost import CaptureCosts
    from harness.planner.surface import StepSurface
    from runners.padding import StepCosts


@dataclass(frozen=True)
class PrefillCurve:
    """Time of a prefill step by its tokens: `[num_points]` each, tokens increasing, times in ms."""

    num_tokens: NDArray[np.float64]
    step_ms: NDArray[np.float64]


@dataclass(frozen=True)
class HostTime:
    """Host time between a step's end and the next step's call: `base_ms` and `per_request_ms` a request."""

    base_ms: float = 0.0
    per_request_ms: float = 0.0


@dataclass(frozen=True)
class CostSource:
    """Where a cost table comes from, for every output that uses it."""

    path: str
    #: `cuda` for a run of ours; an engine's name for a table from its log.
    graph_backend: str
    verified: bool
    model: str | None = None
    device: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class CostTable:
    """Measured costs. What was not measured raises ConfigError with the setting that measures it."""

    source: CostSource
    graph: StepSurface
    eager: StepSurface
    prefill: PrefillCurve | None
    host: HostTime
    captures: CaptureCosts
    #: What `cheapest` and `split` decide by: the medians at one context, as the runner reads them.
    step_costs: StepCosts

    def graph_ms(self, size: int, num_kv_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Time of a step that replays the graph of `size`."""
        if not self.graph.covers(size):
            low, high = self.graph.sizes[0], self.graph.sizes[-1]
            raise ConfigError(
                "RUN",
                self.source.path,
                f"has graph times for sizes {low} to {high}, but not for {size}: measure a run that captures it, "
                "or lower --max-batch-size",
            )
        return self.graph.step_ms(size, num_kv_tokens)

    def eager_ms(self, batch_size: int, num_kv_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Time of a step that runs eagerly."""
        if not self.eager.covers(batch_size):
            raise ConfigError(
                "RUN",
                self.source.path,
                f"has no eager time for batches of {batch_size}: set measure.batch_sizes so that they reach it",
            )
        return self.eager.step_ms(batch_size, num_kv_tokens)

    def prefill_ms(self, num_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Time of prefill steps; below the smallest chunk measured, that one's time is held."""
        if self.prefill is None:
            raise ConfigError(
                "RUN", self.source.path, "has no prefill times: measure one with measure.prefill_tokens=[…]"
            )
        largest = int(self.prefill.num_tokens[-1])
        if num_tokens.max() > largest:
            raise ConfigError(
                "RUN",
                self.source.path,
                f"has prefill times up to {largest} tokens, but a chunk has {num_tokens.max()}: add it to "
                "measure.prefill_tokens, or lower --prefill-chunk-tokens",
            )
        return np.interp(num_tokens, self.prefill.num_tokens, self.prefill.step_ms)

    def host_ms(self, batch_size: int) -> float:
        return self.host.base_ms + self.host.per_request_ms * batch_size

    def candidates(self, max_batch_size: int, interpolated: bool = False) -> list[int]:
        """The sizes that a plan may capture: the measured ones, or all between them; the maximum always."""
        sizes = range(self.graph.sizes[0], max_batch_size + 1) if interpolated else self.graph.sizes
        return sorted({size for size in sizes if size <= max_batch_size} | {max_batch_size})
