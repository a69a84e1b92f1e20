"""What an optional dependency's absence means: a refusal that says what to install."""

from __future__ import annotations

from importlib.util import find_spec

from harness.errors import ConfigError


def require_extra(extra: str, packages: tuple[str, ...], field: str, value: object) -> None:
    """Raise ConfigError for `field=value` unless every one of `packages`, the import names of `extra`, is there."""
    for package in packages:
        if find_spec(package) is None:
            raise ConfigError(
                field, value, f"needs the package {package}: pip install 'cudagraph-harness[{extra}]'"
            )
