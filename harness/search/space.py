"""What a search may choose from: the swept values of a command line, as Optuna's distributions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from harness.errors import ConfigError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

#: One proposal: the value of each searched key.
Point = Mapping[str, Any]


@dataclass(frozen=True)
class Space:
    """The keys that are searched, and the overrides that every job shares."""

    distributions: dict[str, BaseDistribution]
    shared: tuple[str, ...]

    def overrides(self, point: Point) -> list[str]:
        """Return the overrides of the job at `point`."""
        return [*self.shared, *(f"{key}={point[key]}" for key in self.distributions)]

    def points(self) -> Iterator[Point]:
        """Return every point if there is a finite number of them, else none."""
        choices = [_choices(distribution) for distribution in self.distributions.values()]
        if any(values is None for values in choices):
            return
        for values in itertools.product(*(values or () for values in choices)):
            yield dict(zip(self.distributions, values, strict=True))

    def samples(self) -> list[Point]:
        """Return points among which each choice of each key stands once or more: to see that they all compose."""
        choices = {key: _choices(distribution) or () for key, distribution in self.distributions.items()}
        first = {key: _first(distribution) for key, distribution in self.distributions.items()}
        return [first | {key: value} for key, values in choices.items() for value in values]


def read_space(overrides: Sequence[Override]) -> Space:
    """Split the overrides into those that are searched, `a,b`, `choice`, `range` or `interval`, and the rest.

    A later override of a key replaces an earlier one, as in a sweep. Raises ConfigError if none is searched.
    """
    last = {override.get_key_element(): override for override in overrides}
    searched = {key: override for key, override in last.items() if override.is_sweep_override()}
    if not searched:
        raise ConfigError(
            "hydra/sweeper", "optuna", "nothing to search: give a key several values, capture=vllm,sglang"
        )
    shared = tuple(str(override.input_line) for key, override in last.items() if key not in searched)
    return Space({key: _distribution(key, override) for key, override in searched.items()}, shared)


def _distribution(key: str, override: Override) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    sweep = override.value()
    if isinstance(sweep, RangeSweep) and all(isinstance(end, int) for end in (sweep.start, sweep.stop)):
        start, stop, step = int(sweep.start or 0), int(sweep.stop or 0), int(sweep.step)
        last = start + (stop - 1 - start) // step * step
        return IntDistribution(start, last, step=step)
    if isinstance(sweep, IntervalSweep):
        low, high = sweep.start, sweep.end
        if low is None or high is None or low >= high:
            raise ConfigError(
                key, _written(override), "give the lower end, then the higher: interval(0.1,1.0)"
            )
        is_log = "log" in sweep.tags
        if isinstance(low, int) and isinstance(high, int):
            return IntDistribution(low, high, log=is_log)
        return FloatDistribution(float(low), float(high), log=is_log)
    if isinstance(sweep, ChoiceSweep | RangeSweep):
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    raise ConfigError(
        key, _written(override), "cannot be searched: write a,b, range(1,9) or interval(0.1,1.0)"
    )


def _written(override: Override) -> str:
    return str(override.input_line).partition("=")[2]


def _choices(distribution: BaseDistribution) -> Sequence[Any] | None:
    from optuna.distributions import CategoricalDistribution, IntDistribution

    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices
    if isinstance(distribution, IntDistribution):
        return range(distribution.low, distribution.high + 1, distribution.step)
    return None


def _first(distribution: BaseDistribution) -> Any:
    choices = _choices(distribution)
    return choices[0] if choices else distribution.low  # type: ignore[attr-defined]
