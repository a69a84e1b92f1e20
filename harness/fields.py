"""What a field of the schema admits: its choices, its bounds, and the check that reads them."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from typing import Any

from harness.errors import ConfigError
from harness.suggest import did_you_mean

#: How YAML 1.1 reads `off`, `on`, `no` and `yes`, and what a string field makes of it.
YAML_BOOLEANS = ("true", "false", "on", "off", "yes", "no")


def one_of(default: str, *choices: str) -> Any:
    """Declare a text field that admits `choices` only."""
    return dataclasses.field(default=default, metadata={"choices": choices})


def number(
    default: float | None,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    infinite: bool = False,
) -> Any:
    """Declare an int or float field within bounds; None is admitted where the type says so.

    Infinity is admitted only where `infinite` says that it has a meaning.
    """
    return dataclasses.field(default=default, metadata={"ge": ge, "gt": gt, "le": le, "infinite": infinite})


def numbers(*default: int, ge: int = 1) -> Any:
    """Declare a list of ints, each at least `ge`."""
    return dataclasses.field(default_factory=lambda: list(default), metadata={"ge": ge})


def list_fields(schema: type) -> frozenset[str]:
    """Return the dotted keys of `schema` that hold a list."""
    return frozenset(key for key, hint in walk_types(schema) if typing.get_origin(hint) is list)


def field_names(schema: type) -> list[str]:
    """Return every dotted key of `schema`, groups included."""
    return [key for key, _ in walk_types(schema)]


def walk_types(schema: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, type) of every field, depth first."""
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        key = f"{prefix}{field.name}"
        hint = hints[field.name]
        yield key, hint
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from walk_types(hint, f"{key}.")


def type_words(schema: type, key: str) -> str:
    """Say what the field `key` takes, in a user's words."""
    hint = dict(walk_types(schema)).get(key)
    words: list[str] = []
    for part in _alternatives(hint):
        if part is bool:
            words.append("true or false")
        elif part is int:
            words.append("a whole number")
        elif part is float:
            words.append("a number")
        elif part is str:
            words.append("a text")
        elif part is type(None):
            words.append("null")
        elif typing.get_origin(part) is list:
            words.append(f"a list such as {key}=[1,2,4]")
        elif typing.get_origin(part) is dict or dataclasses.is_dataclass(part):
            words.append("a mapping of keys to values")
    return " or ".join(words) or "another value"


def _alternatives(hint: Any) -> tuple[Any, ...]:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return typing.get_args(hint)
    return (hint,)


def check_fields(section: Any, prefix: str = "") -> None:
    """Raise ConfigError for the first field, in the schema's order, that its declaration does not admit."""
    for field in dataclasses.fields(section):
        key = f"{prefix}{field.name}"
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            check_fields(value, f"{key}.")
        elif "choices" in field.metadata:
            _check_choice(key, value, field.metadata["choices"])
        elif isinstance(value, list):
            _check_list(key, value, field.metadata)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            _check_bounds(key, value, value, field.metadata)


def _check_list(key: str, value: list[Any], bounds: Any) -> None:
    holds_numbers = "ge" in bounds
    for item in value:
        # OmegaConf lets a mapping into a list of anything.
        if not isinstance(item, int if holds_numbers else str):
            raise ConfigError(
                key, value, f"give a list such as {key}=[{'1,2,4' if holds_numbers else 'a,b'}]"
            )
        if holds_numbers:
            _check_bounds(key, int(item), value, bounds)


def _check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value in choices:
        return
    listing = f"choose one of {', '.join(choices)}"
    if value.lower() in YAML_BOOLEANS:
        quiet = next((word for word in ("none", "disabled") if word in choices), None)
        instead = f"write {key}={quiet}; " if quiet else ""
        raise ConfigError(key, value, f"YAML reads on, off, yes and no as a boolean: {instead}{listing}")
    raise ConfigError(key, value, listing + did_you_mean(value, choices))


def _check_bounds(key: str, value: float, shown: Any, bounds: Any) -> None:
    if math.isnan(value) or (math.isinf(value) and not bounds.get("infinite")):
        raise ConfigError(key, shown, "give a finite number")
    ge, gt, le = bounds.get("ge"), bounds.get("gt"), bounds.get("le")
    if ge is not None and value < ge:
        raise ConfigError(key, shown, f"must be at least {ge}")
    if gt is not None and value <= gt:
        raise ConfigError(key, shown, f"must be greater than {gt}")
    if le is not None and value > le:
        raise ConfigError(key, shown, f"must be at most {le}")
