"""Counts what torch.compile did behind a step's back: it warns in a log, and the step is only slower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

from torch._dynamo.utils import counters

from runners.models.context import num_eager_layers

_LIMIT_HIT = "recompile limit exceeded"


@dataclass(frozen=True)
class CompileCounts:
    """What the compiled steps of a runner came to. All but the first should be 0."""

    #: Graphs compiled in warm-up: sizes times attention groups, fewer with dynamic shapes.
    num_graphs: int = 0
    #: Graphs compiled after warm-up: a step waited for each.
    num_recompiles: int = 0
    #: Places where a compiled function fell back to Python, warm-up included.
    num_graph_breaks: int = 0
    #: Times that dynamo gave a function up because it was compiled too often.
    num_recompile_limit_hits: int = 0
    #: The most layers of a compiled step that ran as plain Python.
    num_uncompiled_layers: int = 0
    #: Compiled functions that Inductor was to put into CUDA graphs of its own, and did not.
    num_cudagraph_skips: int = 0

    @property
    def warning(self) -> str | None:
        """Say what is not 0 and should be, and where to look; None if all is well."""
        problems = {
            "recompiles after warm-up": self.num_recompiles,
            "graph breaks": self.num_graph_breaks,
            "recompile limit hits": self.num_recompile_limit_hits,
            "layers left uncompiled": self.num_uncompiled_layers,
            "functions without Inductor's CUDA graphs": self.num_cudagraph_skips,
        }
        found = [f"{count} {what}" for what, count in problems.items() if count]
        if not found:
            return None
        return (
            f"torch.compile: {', '.join(found)}. Latencies of compiled steps include them; "
            "TORCH_LOGS=recompiles,graph_breaks,cudagraphs names the code."
        )


class CompileWatch:
    """Adds up what dynamo counts during the compiled steps of one runner, and only then."""

    def __init__(self) -> None:
        self.counts = CompileCounts()
        self._is_warm_up = False

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """Graphs compiled in the block are expected."""
        self._is_warm_up = True
        try:
            yield
        finally:
            self._is_warm_up = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count what happens in the block, one compiled step."""
        before = _read()
        try:
            yield
        finally:
            self._add(before, _read())

    def _add(self, before: CompileCounts, after: CompileCounts) -> None:
        if after == before:
            return
        grown = {
            field.name: getattr(after, field.name) - getattr(before, field.name)
            for field in fields(CompileCounts)
        }
        if not self._is_warm_up:
            grown["num_recompiles"], grown["num_graphs"] = grown["num_graphs"], 0
        eager_layers = grown.pop("num_uncompiled_layers")
        total = {name: getattr(self.counts, name) + count for name, count in grown.items()}
        self.counts = replace(
            self.counts,
            **total,
            num_uncompiled_layers=max(self.counts.num_uncompiled_layers, eager_layers),
        )


def _read() -> CompileCounts:
    """Return dynamo's counters of this process so far."""
    refusals = counters["unimplemented"]
    limit_hits = sum(count for reason, count in refusals.items() if _LIMIT_HIT in reason)
    return CompileCounts(
        num_graphs=counters["stats"]["unique_graphs"],
        num_graph_breaks=counters["graph_break"].total() + refusals.total() - limit_hits,
        num_recompile_limit_hits=limit_hits,
        num_uncompiled_layers=num_eager_layers(),
        num_cudagraph_skips=counters["inductor"]["cudagraph_skips"],
    )
