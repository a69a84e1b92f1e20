"""Turns what Hydra and OmegaConf raise into field, value and remedy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from harness.errors import ConfigError
from harness.explain_file import explain_file
from harness.fields import field_names, type_words
from harness.suggest import closest, did_you_mean

_GROUP_CHOICE = re.compile(r"Could not find '(?P<group>[^']*)/(?P<choice>[^'/]*)'")
_NO_SUCH_GROUP = re.compile(r"config group '(?P<group>[^']*)' does not exist|No match in the defaults list")
_NO_OVERRIDE = re.compile(r"Could not (?:override|delete from config\.) '(?P<key>[^']*)'")
_CHOSEN_TWICE = re.compile(
    r"Multiple values for (?P<group>\S+)\. To override a value use 'override \S+ (?P<choice>.*)'"
)
#: What people write for "no": each group that can be switched off calls it so.
_OFF_WORDS = ("off", "no", "false", "null", "none", "disabled", "disable")
_OFF_CHOICES = ("none", "disabled", "eager")


def explain(
    error: Exception, overrides: Sequence[str] = (), folders: Sequence[Path] = ()
) -> ConfigError | None:
    """Return `error` as a ConfigError, or None if it is no complaint about the configuration.

    `overrides` are those of the command line: Hydra's messages do not always say which one it was.
    `folders` hold configurations of the user's own.
    """
    if isinstance(error, ConfigError):
        return error
    in_file = explain_file(error, folders)
    if in_file is not None:
        return in_file
    if isinstance(error, OverrideParseException):
        return explain_parse(str(error.override), str(error))
    if isinstance(error, MissingConfigException):
        return _explain_missing(error)
    if isinstance(error, OmegaConfBaseException):
        told = explain_omegaconf(error)
        return ConfigError(told.field, told.value or _blamed_value(told.field, overrides), told.remedy)
    if isinstance(error, HydraException):
        return _explain_composition(error, overrides)
    if isinstance(error, ValueError) and str(error).startswith("Config group override"):
        return ConfigError(
            "override", " ".join(overrides), "a group takes the name of one choice: group=choice"
        )
    return None


def explain_omegaconf(error: OmegaConfBaseException, given: object = None) -> ConfigError:
    """Return the ConfigError for a value that does not fit the schema.

    `given` is the configuration that was read: an unknown key's value stands only there.
    """
    from harness.schema import Config

    field = re.sub(r"\[\d+\]$", "", str(error.full_key or error.key or "configuration"))
    known = field_names(Config)
    if isinstance(error, InterpolationResolutionError):
        return ConfigError(field, error.value, "the ${...} in this value names no key; correct or remove it")
    if field not in known and not field.startswith("model.config."):
        value = OmegaConf.select(given, field) if isinstance(given, DictConfig) else error.value
        return unknown_key(field, value)
    return ConfigError(field, error.value, f"give {type_words(Config, field)}")


def unknown_key(field: str, value: object) -> ConfigError:
    """Return the ConfigError for a key that no schema has, with the nearest one that exists."""
    from harness.schema import Config

    group = field.rsplit(".", 1)[0] + "." if "." in field else ""
    if group.startswith("hydra."):
        return ConfigError(field, value, "unknown key of Hydra's (--cfg hydra shows all of them)")
    known = field_names(Config)
    siblings = [key[len(group) :] for key in known if key.startswith(group) and "." not in key[len(group) :]]
    match = closest(field[len(group) :], siblings)
    elsewhere = [key for key in known if "." in key and key.rsplit(".", 1)[-1] == field.rsplit(".", 1)[-1]]
    match = f"{group}{match}" if match else next(iter(elsewhere), None)
    hint = (
        f"did you mean {match}?"
        if match
        else f"{group.rstrip('.') or 'the configuration'} has {', '.join(siblings[:20])}"
    )
    return ConfigError(field, value, f"unknown key; {hint} (--cfg job shows all keys)")


def explain_parse(override: str, message: str) -> ConfigError:
    """Return the ConfigError for an override that is no override; `message` is the parser's."""
    key, equals, _ = override.partition("=")
    if "missing EQUAL" in message or not equals:
        return ConfigError(override, "", "write group=choice or key=value; --help lists the groups")
    return _for_override(
        override, f"cannot be read: close every bracket, or put a text in quotes, {key}=\"'...'\""
    )


def _explain_missing(error: MissingConfigException) -> ConfigError:
    match = _GROUP_CHOICE.search(str(error))
    if match is None:
        return ConfigError(
            "--config-name", error.missing_cfg_file, "no such configuration; leave --config-name out"
        )
    group, choice = match["group"], match["choice"]
    # compose.register_presets stores the class of a preset beside it.
    options = [option for option in error.options or () if not option.endswith("_class")]
    return refuse_choice(group, choice, options)


def refuse_choice(group: str, choice: str, options: Sequence[str]) -> ConfigError:
    """Return the ConfigError for a choice that a group does not have, with what was probably meant."""
    hint = did_you_mean(choice, options)
    if choice.lower() in _OFF_WORDS:
        quiet = next((word for word in _OFF_CHOICES if word in options), None)
        hint = f"; write {group}={quiet}" if quiet else hint
    return ConfigError(group, choice, f"choose one of {', '.join(options)}{hint}")


def _explain_composition(error: HydraException, overrides: Sequence[str]) -> ConfigError:
    text, cause = str(error), error.__cause__
    if text.startswith("Ambiguous value for argument"):
        return _for_override(
            _blamed(text, overrides), "this key takes one value; to run one job for each, add -m"
        )
    if text.startswith("Could not append to config"):
        override = _blamed(text, overrides)
        return _for_override(override.lstrip("+"), f"this key is there already: write {override.lstrip('+')}")
    if twice := _CHOSEN_TWICE.search(text):
        group, choice = twice["group"], twice["choice"]
        remedy = (
            f"chosen already: in the defaults of a file of your own write `- override /{group}: {choice}`"
        )
        return ConfigError(group, choice, remedy)
    merging = re.match(r"Error merging override (?P<override>.*)", text)
    missing = _NO_OVERRIDE.match(text)
    if missing:
        return unknown_key(missing["key"], _blamed_value(missing["key"], overrides))
    if merging and isinstance(cause, OmegaConfBaseException):
        told = explain_omegaconf(cause)
        shown = merging["override"].partition("=")[2]
        return ConfigError(told.field, shown or told.value, told.remedy)
    if isinstance(cause, OmegaConfBaseException):
        return explain_omegaconf(cause)
    if _NO_SUCH_GROUP.search(text):
        return _for_override(
            _blamed(text, overrides), "no such group; --help lists the groups and their choices"
        )
    lines = [line.strip() for line in text.splitlines() if "while composing" not in line]
    return _for_override(_blamed(text, overrides), next(filter(None, lines), "does not compose"))


def _blamed(text: str, overrides: Sequence[str]) -> str:
    """Return the override that the message quotes, else the only one, else nothing."""
    quoted = [override for override in overrides if override in text]
    if quoted:
        return max(quoted, key=len)
    named = [override for override in overrides if override.partition("=")[0].lstrip("+~") in text]
    return named[0] if named else (overrides[0] if len(overrides) == 1 else "")


def _blamed_value(key: str, overrides: Sequence[str]) -> str:
    values = [text.partition("=")[2] for text in overrides if text.partition("=")[0].lstrip("+~") == key]
    return values[-1] if values else ""


def _for_override(override: str, remedy: str) -> ConfigError:
    key, _, value = override.partition("=")
    return ConfigError(key or "configuration", value, remedy)
