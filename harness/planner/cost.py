"""The cost table of a measured run: what a step takes, and what a capture list takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from harness.errors import ConfigError
from harness.planner.excess import ExcessRates
from harness.workload.engine_logs import ENGINE_LOG_FORMATS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.planner.capture_cost import CaptureCosts
    from harness.planner.host_time import HostTime, PrefillCurve
    from harness.planner.surface import StepSurface
    from runners.padding import StepCosts


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

    @property
    def is_log(self) -> bool:
        """Whether an engine's log gave the times: one a size, at whatever contexts it met."""
        return self.graph_backend in ENGINE_LOG_FORMATS


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
    graph_excess: ExcessRates = field(default_factory=lambda: ExcessRates({}, {}))
    eager_excess: ExcessRates = field(default_factory=lambda: ExcessRates({}, {}))

    def graph_ms(
        self, size: int, num_kv_tokens: NDArray[np.float64], batch_size: NDArray[np.int64] | int | None = None
    ) -> NDArray[np.float64]:
        """Time of a step that replays the graph of `size` for requests of one length.

        `batch_size` is how many they are (`size`, if not given); the other rows are padding.
        """
        if not self.graph.covers(size):
            low, high = self.graph.sizes[0], self.graph.sizes[-1]
            raise ConfigError(
                "RUN",
                self.source.path,
                f"has graph times for sizes {low} to {high}, but not for {size}: measure a run that captures it, "
                "or lower --max-batch-size",
            )
        step_ms = self.graph.step_ms(size, num_kv_tokens)
        if batch_size is None:
            return step_ms
        beyond = num_kv_tokens * (1 / np.asarray(batch_size) - 1 / size)
        return step_ms + self.graph_excess.padding_ms(size) * beyond

    def eager_ms(self, batch_size: int, num_kv_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Time of a step that runs eagerly."""
        if not self.eager.covers(batch_size):
            raise ConfigError(
                "RUN",
                self.source.path,
                f"has no eager time for batches of {batch_size}, which no graph holds: end the list of sizes higher, lower "
                "--max-batch-size, or measure a run with measure.batch_sizes that reach it",
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

    def host_ms(self, batch_size: int, after_prefill: bool = False) -> float:
        return self.host.ms(batch_size, after_prefill)

    def candidates(self, max_batch_size: int, interpolated: bool = False) -> list[int]:
        """The sizes that a plan may capture: the measured ones, or all between them; the maximum always."""
        sizes = range(self.graph.sizes[0], max_batch_size + 1) if interpolated else self.graph.sizes
        return sorted({size for size in sizes if size <= max_batch_size} | {max_batch_size})
