"""Where a model comes from: a config in the experiment, a folder, a hub id or a GGUF file.

Nothing here reads a weight or runs code from a checkpoint: pickles are refused by name, and
`trust_remote_code` is never set.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
#: How long the hub may take to answer at all; otherwise what its cache holds is used.
_HUB_TIMEOUT_S = 10.0
_COMMIT = re.compile(r"[0-9a-f]{40}")


class ModelSourceError(ValueError):
    """A model cannot be had as configured. `field`, `value` and `remedy` say what to change."""

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        super().__init__(f"{field}={value}: {problem} {remedy}")
        self.field = field
        self.value = value
        self.remedy = remedy


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are known to be complete and free of pickles, as far as names tell."""

    #: What `from_pretrained` takes: a folder or a hub id.
    location: str
    #: Commit of the hub repository, or None for local files.
    revision: str | None = None
    #: Name of the GGUF file in the folder `location`, if it is one.
    gguf_file: str | None = None
    #: Local weight files and config; empty for a hub id.
    files: list[Path] = field(default_factory=list)


def find_checkpoint(source: str, path: str | None, revision: str | None) -> Checkpoint:
    """Locate the checkpoint of `model.source`, `model.path` and `model.revision`.

    Raises ModelSourceError if it is missing, incomplete, pickled or out of reach.
    """
    if not path:
        raise ModelSourceError(
            "model.path",
            path,
            f"model.source={source} needs a path.",
            "Set model.path to a folder or a hub id.",
        )
    local = Path(path).expanduser()
    if source == "gguf":
        _refuse_revision(path, revision)
        return _gguf_file(local)
    if local.is_dir():
        _refuse_revision(path, revision)
        return Checkpoint(str(local), files=_weight_files(local))
    if local.exists():
        raise ModelSourceError("model.path", path, "is a file.", "Give the folder that holds config.json.")
    if _looks_local(path):
        raise ModelSourceError("model.path", path, "there is no such folder.", "Check the path.")
    return _hub_repository(path, revision)


def read_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the checkpoint's config.json as it stands; a GGUF file's config comes from transformers."""
    if checkpoint.gguf_file is not None:
        from transformers import PreTrainedConfig

        with gguf_errors(checkpoint):
            config, _ = PreTrainedConfig.get_config_dict(checkpoint.location, gguf_file=checkpoint.gguf_file)
        return dict(config)
    if checkpoint.revision is None:
        return _parse_config(Path(checkpoint.location) / "config.json")
    return _parse_config(_hub_file(checkpoint.location, "config.json", checkpoint.revision))


def _parse_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ModelSourceError(
            "model.path", path.parent, "there is no config.json.", "Give a folder saved by save_pretrained."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelSourceError("model.path", path, f"is not JSON ({error}).", "Restore the file.") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelSourceError("model.path", path, "names no model_type.", "Give a transformers checkpoint.")
    return config


# --- a folder ----------------------------------------------------------------------------------


def _weight_files(folder: Path) -> list[Path]:
    names = {entry.name for entry in folder.iterdir()}
    index = folder / _INDEX
    if _SINGLE in names:
        shards = {_SINGLE}
    elif _INDEX in names:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    else:
        raise _no_safetensors(str(folder), names)
    missing = sorted(shards - names)
    if missing:
        raise ModelSourceError(
            "model.path",
            folder,
            f"the weights are incomplete: {', '.join(missing)} is missing.",
            "Copy it again.",
        )
    return [folder / name for name in sorted(shards | (names & {"config.json", _INDEX}))]


def _no_safetensors(path: str, names: set[str]) -> ModelSourceError:
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    if pickles:
        return ModelSourceError(
            "model.path",
            path,
            f"holds pickled weights only ({pickles[0]}), and loading a pickle runs the code in it.",
            "Convert it once where you trust it: from_pretrained(...).save_pretrained(...).",
        )
    gguf = sorted(name for name in names if name.endswith(".gguf"))
    if gguf:
        return ModelSourceError(
            "model.path", path, f"holds {gguf[0]}.", f"Use model.source=gguf model.path={path}/{gguf[0]}."
        )
    return ModelSourceError(
        "model.path", path, f"holds neither {_SINGLE} nor {_INDEX}.", "Give a checkpoint in safetensors."
    )


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or path.endswith((".gguf", ".safetensors"))


def _refuse_revision(path: str, revision: str | None) -> None:
    if revision is not None:
        raise ModelSourceError(
            "model.revision",
            revision,
            f"{path} is local, and only a hub id has revisions.",
            "Leave it unset.",
        )


# --- a GGUF file -------------------------------------------------------------------------------


def _gguf_file(path: Path) -> Checkpoint:
    if not path.is_file() or path.suffix != ".gguf":
        raise ModelSourceError("model.path", path, "is not a .gguf file.", "Give the path of one file.")
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelSourceError(
            "model.source",
            "gguf",
            f"the package {missing[0]} is not installed.",
            "Run: pip install 'cudagraph-harness[gguf]'.",
        )
    return Checkpoint(str(path.parent), gguf_file=path.name, files=[path])


@contextmanager
def gguf_errors(checkpoint: Checkpoint) -> Iterator[None]:
    """Turn what the readers of a GGUF file raise in the block into a ModelSourceError."""
    try:
        yield
    except (ValueError, KeyError, IndexError, NotImplementedError, struct.error) as error:
        if checkpoint.gguf_file is None or isinstance(error, ModelSourceError):
            raise
        path = Path(checkpoint.location) / checkpoint.gguf_file
        raise ModelSourceError(
            "model.path",
            path,
            f"cannot be read as a GGUF file ({error}).",
            "Copy it again, or give another: transformers must know its architecture and types.",
        ) from error


# --- the hub -----------------------------------------------------------------------------------


def _hub_repository(repo_id: str, revision: str | None) -> Checkpoint:
    """Resolve a branch or tag to its commit, so that the record names exactly what ran."""
    config = _hub_file(repo_id, "config.json", revision)
    # In the hub's cache a file lies at snapshots/<commit>/<name>.
    commit = config.parent.name
    if not _COMMIT.fullmatch(commit):
        raise ModelSourceError(
            "model.path", repo_id, "the hub cache names no commit.", "Clear that cache entry."
        )
    names = _hub_names(repo_id, commit, config.parent)
    if not names & {_SINGLE, _INDEX}:
        raise _no_safetensors(repo_id, names)
    return Checkpoint(repo_id, revision=commit)


def _hub_names(repo_id: str, commit: str, snapshot: Path) -> set[str]:
    from huggingface_hub import HfApi

    try:
        return set(HfApi().list_repo_files(repo_id, revision=commit))
    except (OSError, ValueError):
        # Out of reach: what the cache holds is what can be loaded.
        return {entry.name for entry in snapshot.iterdir()}


def _hub_file(repo_id: str, name: str, revision: str | None) -> Path:
    from huggingface_hub import errors, hf_hub_download

    try:
        with _without_retry_messages():
            cached_only = not _is_hub_reachable()
            return Path(hf_hub_download(repo_id, name, revision=revision, local_files_only=cached_only))
    except errors.GatedRepoError as error:
        raise ModelSourceError(
            "model.path", repo_id, "is gated.", "Accept its terms on the hub, then run: hf auth login."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelSourceError(
            "model.revision", revision, f"{repo_id} has no such revision.", "Check it."
        ) from error
    except (errors.HFValidationError, errors.RepositoryNotFoundError) as error:
        raise ModelSourceError(
            "model.path", repo_id, "is neither a folder here nor a model on the hub.", "Check the spelling."
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise ModelSourceError(
            "model.path", repo_id, f"has no {name}.", "Give a transformers model."
        ) from error
    except OSError as error:
        raise ModelSourceError(
            "model.path",
            repo_id,
            "is not in the local cache, and the hub cannot be reached.",
            f"Run once with network: hf download {repo_id}; or set model.path to a local folder.",
        ) from error


def _is_hub_reachable() -> bool:
    """Ask once: without a network the client's own retries take half a minute before they give up."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_S)
    except Exception:  # the client's HTTP library, and with it its errors, differs by version
        return False
    return True


@contextmanager
def _without_retry_messages() -> Iterator[None]:
    """Keep the hub client from warning at each of its retries: what it comes to is said once, by us."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
