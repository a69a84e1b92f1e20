"""Reads the overrides of a command line: list fields as people write them, and what is refused outright."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import OverrideParseException

from harness.compose import group_choices
from harness.errors import ConfigError
from harness.explain import explain_parse, refuse_choice
from harness.fields import list_fields
from harness.schema import Config

#: A mapping of these keys names a Python object to import; no configuration may.
FORBIDDEN_KEYS = ("_target_", "_partial_", "_args_", "_recursive_", "_convert_")


def read_overrides(overrides: Sequence[str], multirun: bool) -> list[str]:
    """Return the overrides as Hydra wants them; ConfigError for those that cannot be meant.

    `k=1,2,4` on a list field is the list [1,2,4], and `k=4` the list [4]. With `multirun` a bare comma
    always sweeps, so that there it is refused for a list field unless every choice is a list.
    """
    parser = OverridesParser.create()
    lists = list_fields(Config)
    rewritten: list[str] = []
    for text in overrides:
        refuse_text(text)
        try:
            parsed = parser.parse_overrides([text])[0]
        except OverrideParseException as error:
            raise explain_parse(text, str(error)) from error
        key = parsed.key_or_group
        _check_group(key, parsed.value(), text.partition("=")[2])
        if key in lists and not parsed.is_delete():
            text = _read_list(parsed, text, multirun)
        rewritten.append(text)
    return _without_overlay(rewritten)


def _without_overlay(overrides: list[str]) -> list[str]:
    """`experiment=null` is no overlay: Hydra takes that in its YAML, but on a command line only as a deletion."""
    given = [text for text in overrides if text.partition("=")[0] == "experiment"]
    if not given or given[-1] != "experiment=null":
        return [text for text in overrides if text != "experiment=null"]
    return [*(text for text in overrides if text not in given), "~experiment"]


def _check_group(key: str, value: object, text: str) -> None:
    """Refuse what is no word where a group's choice stands (Hydra's own message does not name it)."""
    choices = group_choices(key)
    words = value if isinstance(value, list) else [value]
    if choices and isinstance(value, ChoiceSweep) and None in value.list:
        raise ConfigError(key, text, "null cannot be swept beside others: run the jobs without it apart")
    if choices and value is None and key != "experiment":
        raise refuse_choice(key, "null", choices)
    if choices and any(isinstance(word, bool | int | float | list) for word in words):
        raise ConfigError(key, value, f"choose one of {', '.join(choices)}")


def refuse_text(text: str) -> None:
    """Raise ConfigError for an override that would import or search for foreign objects."""
    key, _, value = text.partition("=")
    if not key.lstrip("+~"):
        raise ConfigError("override", text, "write group=choice or key=value")
    if any(word in text for word in FORBIDDEN_KEYS):
        raise ConfigError(
            key.lstrip("+~"), value, "a configuration may not name Python objects: leave it out"
        )
    if key.lstrip("+~") in ("hydra.searchpath", "hydra.callbacks") or key.lstrip("+~").startswith(
        "hydra.callbacks."
    ):
        raise ConfigError(
            key.lstrip("+~"), value, "not used here: add a folder of your own with --config-dir"
        )


def refuse_foreign_folder(option: str, folder: Path) -> None:
    """Raise ConfigError if a folder of the user's own is missing, or a YAML file in it names a Python object."""
    if not folder.is_dir():
        raise ConfigError(option, folder, "no such folder")
    for path in sorted(folder.rglob("*.y*ml")):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(option, folder, f"{path} cannot be read: {error}") from error
        for word in (*FORBIDDEN_KEYS, "searchpath", "callbacks"):
            if word in text:
                raise ConfigError(option, folder, f"{path} has {word}, which no configuration may: remove it")


def _read_list(override: Override, text: str, multirun: bool) -> str:
    key = override.get_key_element()
    raw = text.partition("=")[2].strip()
    if override.is_sweep_override():
        return _read_swept_list(override, text, raw, multirun)
    value = override.value()
    if isinstance(value, list | dict) or value is None or raw.startswith("${"):
        return text
    return f"{key}=[{raw}]"


def _read_swept_list(override: Override, text: str, raw: str, multirun: bool) -> str:
    key, name = override.get_key_element(), override.key_or_group
    sweep = override.value()
    choices = list(sweep.list) if isinstance(sweep, ChoiceSweep) else []
    are_lists = [isinstance(choice, list) for choice in choices]
    if multirun:
        if choices and all(are_lists):
            return text
        raise ConfigError(name, raw, f"write {name}=[1,2,4]; several lists: {name}=[1,2],[1,4]")
    if any(are_lists):
        raise ConfigError(name, raw, f"one job takes one list, {name}=[1,2,4]; to run one job a list, add -m")
    if isinstance(sweep, ChoiceSweep) and sweep.simple_form:
        return f"{key}=[{raw}]"
    raise ConfigError(name, raw, f"write the numbers out: {name}=[1,2,4]")


def is_multirun(overrides: Sequence[str], flag: bool) -> bool:
    """Return whether this command line runs several jobs: -m, or hydra.mode=MULTIRUN."""
    modes = [
        text.partition("=")[2] for text in overrides if text.partition("=")[0].lstrip("+") == "hydra.mode"
    ]
    return flag or bool(modes and modes[-1].upper() == "MULTIRUN")
