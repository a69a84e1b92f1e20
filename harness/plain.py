"""Values as plain JSON: what a record, a hash and W&B can hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any


def to_plain(value: Any) -> Any:
    """Return `value` as dicts, lists, strings, numbers, booleans and None.

    Takes dataclasses, enums, paths, sets and anything with `tolist` (numpy, torch) or `item`. A number
    that is not finite becomes None: JSON has no word for it, and it measures nothing. Raises TypeError
    for anything else.
    """
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Enum):
        return to_plain(value.value)
    if isinstance(value, Mapping):
        return {_key(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return [to_plain(item) for item in sorted(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "tolist"):
        return to_plain(value.tolist())
    raise TypeError(f"a record cannot hold a {type(value).__name__}: {value!r}")


def _key(key: object) -> str:
    return str(key.value) if isinstance(key, Enum) else str(key)
