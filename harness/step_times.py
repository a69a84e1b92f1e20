"""What a step takes, known beforehand: the same for each, or by a recorded run's tables."""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from harness.errors import ConfigError

if TYPE_CHECKING:
    from harness.scheduler import ScheduledStep
    from harness.scheduler_loop import StepResult

#: Points of a curve, sorted: where, and ms.
_Curve = Sequence[tuple[float, float]]


class StepTimes(ABC):
    """Times of steps in ms, by what a step does."""

    @abstractmethod
    def decode_ms(self, mode: str, sizes: Sequence[int], context_len: float) -> float:
        """Return the time of a decode step in `mode`; `sizes` are the rows of its parts, padding
        included, and `context_len` the mean of its requests' KV tokens."""

    @abstractmethod
    def prefill_ms(self, num_tokens: int) -> float:
        """Return the time of a prefill step that computes `num_tokens` tokens."""

    def cost_ms(self, step: ScheduledStep, result: StepResult) -> float:
        """Return the time of `step` as it ran."""
        if step.phase == "prefill":
            return self.prefill_ms(step.num_tokens)
        sizes = result.sizes or (result.padded_batch_size,)
        return self.decode_ms(result.mode, sizes, step.num_kv_tokens / step.batch_size)


class FixedTimes(StepTimes):
    """Each step takes `step_ms`; an eager decode step `eager_step_ms`, if given."""

    def __init__(self, step_ms: float, eager_step_ms: float | None = None) -> None:
        self._step_ms = step_ms
        self._eager_step_ms = step_ms if eager_step_ms is None else eager_step_ms

    def decode_ms(self, mode: str, sizes: Sequence[int], context_len: float) -> float:
        return self._eager_step_ms if mode == "eager" else self._step_ms

    def prefill_ms(self, num_tokens: int) -> float:
        return self._step_ms


class CostTable(StepTimes):
    """The medians of a size sweep, linear between measured neighbours and the nearest one beyond them.

    A decode step costs what `sizes.csv` says of its mode, rows and KV tokens, a split the sum of its
    parts; a prefill step what `prefill.csv` says of its tokens, from an empty cache.
    """

    def __init__(
        self,
        sizes: Iterable[Mapping[str, Any]],
        prefill: Iterable[Mapping[str, Any]],
        source: str | Path = "this run",
    ) -> None:
        """Take the rows of `sizes.csv` and `prefill.csv`; those without a measurement are skipped."""
        self._source = source
        #: Mode → context length → rows computed → ms.
        self._decode: dict[str, dict[float, dict[int, float]]] = {}
        # By batch size: of the batches padded to one size, the fullest stands for it.
        for row in sorted(_measured(sizes), key=lambda row: int(row["batch_size"])):
            curves = self._decode.setdefault(str(row["mode"]), {})
            curve = curves.setdefault(float(row["context_len"]), {})
            curve[int(row["padded_batch_size"])] = float(row["step_ms_p50"])
        self._prefill = sorted(
            (float(row["num_tokens"]), float(row["step_ms_p50"])) for row in _measured(prefill)
        )

    @classmethod
    def load(cls, sizes_csv: str | Path) -> Self:
        """Read a run's `sizes.csv` and the `prefill.csv` beside it, if there is one."""
        sizes_csv = Path(sizes_csv)
        prefill_csv = sizes_csv.with_name("prefill.csv")
        return cls(_rows(sizes_csv), _rows(prefill_csv) if prefill_csv.exists() else (), sizes_csv)

    def require(self, *modes: str) -> None:
        """Raise ConfigError unless prefill steps and decode steps in all of `modes` were measured."""
        for mode in modes:
            if mode not in self._decode:
                raise self._lacks(f"{mode} step: give the sizes.csv of a run that measured one")
        if not self._prefill:
            raise self._lacks(
                "prefill step: give a run with a prefill.csv (measure.prefill_tokens) beside it"
            )

    def decode_ms(self, mode: str, sizes: Sequence[int], context_len: float) -> float:
        mode = "graph" if mode == "split" else mode
        if mode not in self._decode:
            raise self._lacks(f"{mode} step: give the sizes.csv of a run that measured one")
        contexts = sorted(self._decode[mode].items())
        return sum(
            _at([(context, _at(sorted(curve.items()), rows)) for context, curve in contexts], context_len)
            for rows in sizes
        )

    def prefill_ms(self, num_tokens: int) -> float:
        if not self._prefill:
            raise self._lacks(
                "prefill step: give a run with a prefill.csv (measure.prefill_tokens) beside it"
            )
        return _at(self._prefill, num_tokens)

    def _lacks(self, what: str) -> ConfigError:
        return ConfigError("workload.costs_path", self._source, f"has no measured {what}")


def _measured(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["step_ms_p50"] not in (None, "")]


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _at(curve: _Curve, where: float) -> float:
    places, times = zip(*curve, strict=True)
    return float(np.interp(where, places, times))
