"""The identity of a measurement: two jobs with the same hash would measure the same thing."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.plain import to_plain
from harness.record import SCHEMA_VERSION

if TYPE_CHECKING:
    from harness.schema import Config, ModelConfig

#: What does not change a measurement: where it is written, published, limited or grouped.
_LEFT_OUT = ("output_dir", "tracking", "job", "sweep")
#: Fields that name a file (or a folder of files) whose content counts, wherever it lies.
_FILE_FIELDS = (
    "model.path",
    "workload.path",
    "workload.costs_path",
    "capture.plan_path",
    "padding.costs_path",
)
#: Of a folder, the files that decide a run: weights, their configuration, measured costs.
_FOLDER_SUFFIXES = (".safetensors", ".gguf", "config.json", "sizes.csv")
_PACKAGES = ("cudagraph-harness", "torch", "transformers", "triton", "flashinfer-python", "numpy")


def config_hash(
    config: Any, environment: Mapping[str, Any] | None = None, *, hub_commit: str | None = None
) -> str:
    """Return the SHA-256 of all that decides a measurement, in hex.

    `config` is the resolved configuration, as plain containers or as the typed `Config`. Of
    `environment`, `device_name` (None on a CPU) and `versions` count; without it, the packages
    installed here and no GPU. `hub_commit` is the resolved commit of a hub model. Files named in the
    configuration count by content.
    """
    environment = environment or {}
    plain: dict[str, Any] = to_plain(config)
    versions = environment.get("versions") or installed_versions()
    identity = {
        "config": {key: value for key, value in plain.items() if key not in _LEFT_OUT},
        "files": {field: _content(_lookup(plain, field)) for field in _FILE_FIELDS},
        "gpu_model": environment.get("device_name"),
        "hub_commit": hub_commit,
        "packages": {package: versions.get(package) for package in _PACKAGES},
        "schema_version": SCHEMA_VERSION,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def expected_hash(config: Config) -> str:
    """Return the hash that a job of `config` will record here, without torch: the GPU's name is the driver's.

    The commit of a hub model is known to the job only: `cached_commit` says which one it would be.
    """
    from harness.nvidia import visible_gpus

    gpus = [] if config.device == "cpu" else visible_gpus()
    number = config.device.partition(":")[2]
    index = int(number) if number.isdigit() else 0
    return config_hash(config, {"device_name": gpus[index].name if index < len(gpus) else None})


def cached_commit(model: ModelConfig) -> str | None:
    """Return the commit of a hub model that lies in the hub's cache here; None if none does, or is needed."""
    if model.source != "pretrained" or model.path is None or Path(model.path).expanduser().exists():
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model.path, "config.json", revision=model.revision)
    return Path(found).parent.name if isinstance(found, str) else None


@functools.cache
def installed_versions() -> dict[str, str | None]:
    """Return the versions of the packages that decide a measurement; None for one not installed."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _lookup(config: Mapping[str, Any], field: str) -> Any:
    group, name = field.split(".")
    return (config.get(group) or {}).get(name)


def _content(path: str | None) -> dict[str, str] | None:
    """Return file name → digest; None for no path, or for a name that is not a local one (a hub id)."""
    if path is None or not (root := Path(path).expanduser()).exists():
        return None
    files = (
        [root] if root.is_file() else sorted(f for f in root.iterdir() if f.name.endswith(_FOLDER_SUFFIXES))
    )
    return {file.name: _digest(file, *_stamp(file)) for file in files}


def _stamp(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns


@functools.lru_cache(maxsize=256)
def _digest(file: Path, size: int, mtime_ns: int) -> str:
    """Digest a file once a process: a sweep asks for the same weights at every point."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
