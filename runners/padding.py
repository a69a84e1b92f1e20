"""How a batch is brought to captured sizes: plans, measured costs and the strategies that choose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["graph", "split", "eager", "compiled"]


@dataclass(frozen=True)
class StepPlan:
    """A way to run one decode step.

    `sizes` are the padded sizes of the parts, in order: `("graph", (8,))` replays the graph of
    size 8, `("split", (4, 2))` the graphs of 4 and then 2, `("eager", ())` runs the batch as it is,
    and `("eager", (8,))` runs it eagerly *padded to 8*, which is what a replay must equal.
    """

    mode: Mode
    sizes: tuple[int, ...] = ()
    #: Why this way was taken, in one word; empty when the strategy simply applied.
    reason: str = ""

    @property
    def num_graphs(self) -> int:
        return len(self.sizes) if self.mode in ("graph", "split") else 0

    def padded_batch_size(self, batch_size: int) -> int:
        """Rows that the model computes, padding included (the sum over a split's parts)."""
        return sum(self.sizes) or batch_size


@dataclass(frozen=True)
class StepCosts:
    """Measured step times in ms. Sizes without a measurement are absent, never 0."""

    #: Captured size → median time of one replay of its graph.
    graph_ms: dict[int, float] = field(default_factory=dict)
    #: Batch size → median time of an eager step.
    eager_ms: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepOutcome:
    """How the last decode step really ran."""

    mode: Mode
    reason: str
    batch_size: int
    padded_batch_size: int
    num_graphs: int
    #: CPU time from the call to the launch, in µs.
    host_prepare_us: float
