"""How many tokens a request has: a number, or a distribution of numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from harness.errors import ConfigError
from harness.fields import check_fields, number, one_of
from harness.suggest import did_you_mean


@dataclass
class LengthSpec:
    """A distribution of token counts; samples are rounded and clipped to [min, max]."""

    distribution: str = one_of("fixed", "fixed", "uniform", "normal", "lognormal", "exponential")
    """Its shape: `fixed` needs mean; `uniform` max; `normal` and `lognormal` mean and std; `exponential` mean."""
    mean: float | None = number(None, gt=0)
    """Mean of the samples (not of their logarithm) before clipping, in tokens."""
    std: float | None = number(None, ge=0)
    """Standard deviation of the samples before clipping, in tokens."""
    min: int = number(1, ge=1)
    """Smallest sample."""
    max: int | None = number(None, ge=1)
    """Largest sample; null: no bound but the model's."""


_NEEDS = {
    "fixed": ("mean",),
    "uniform": ("max",),
    "normal": ("mean", "std"),
    "lognormal": ("mean", "std"),
    "exponential": ("mean",),
}


def length_spec(key: str, raw: Any) -> LengthSpec:
    """Read the value of `key`: a whole number N is `{distribution: fixed, mean: N}`.

    Raises ConfigError for anything that is no distribution. Parameters that the shape does not use
    are left alone: an override of `distribution` keeps its siblings.
    """
    if isinstance(raw, LengthSpec):
        return raw
    if isinstance(raw, int) and not isinstance(raw, bool):
        if raw < 1:
            raise ConfigError(key, raw, "must be at least 1 token")
        return LengthSpec(mean=float(raw))
    if not isinstance(raw, dict):
        raise ConfigError(
            key, raw, "give a whole number, or {distribution: lognormal, mean: 200, std: 100, max: 500}"
        )
    spec = LengthSpec(**_typed(key, raw))
    check_fields(spec, f"{key}.")
    for name in _NEEDS[spec.distribution]:
        if getattr(spec, name) is None:
            raise ConfigError(f"{key}.{name}", None, f"distribution={spec.distribution} needs a number here")
    if spec.max is not None and spec.max < spec.min:
        raise ConfigError(f"{key}.max", spec.max, f"must be at least {key}.min={spec.min}")
    return spec


def _typed(key: str, raw: dict[Any, Any]) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(LengthSpec)]
    typed: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in names:
            raise ConfigError(
                f"{key}.{name}",
                value,
                f"unknown key; choose from {', '.join(names)}{did_you_mean(str(name), names)}",
            )
        typed[name] = _typed_value(f"{key}.{name}", name, value)
    return typed


def _typed_value(key: str, name: str, value: Any) -> Any:
    if name == "distribution":
        return str(value)
    whole = name in ("min", "max")
    if value is None and name != "min":
        return None
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise ConfigError(key, value, "give a whole number" if whole else "give a number")
    return value if whole else float(value)
