"""Turns what Hydra raises about a YAML file of the user's own into file, line, key and remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.errors import ConfigCompositionException
from yaml import MappingNode, MarkedYAMLError, Node, ScalarNode, YAMLError
from yaml import compose as compose_nodes

from harness.errors import ConfigError
from harness.fields import field_names, type_words, walk_types
from harness.suggest import did_you_mean

_IN_FILE = re.compile(r"In '(?P<config>[^']+)': ")
_FULL_KEY = re.compile(r"^\s*full_key: (?P<key>\S+)$", re.MULTILINE)
_NO_GROUP = re.compile(r"Could not override '(?P<group>[^'@]+)")
_NO_SECTION = re.compile(r"Merge error: \w+ is not a subclass of (?P<section>\w+)\. value: (?P<value>.*)")


def explain_file(error: Exception, folders: Sequence[Path]) -> ConfigError | None:
    """Return `error` as a ConfigError that names the line to correct, or None if no such file is to blame.

    `folders` are where the user's own configurations lie (`--config-dir`).
    """
    if isinstance(error, MarkedYAMLError):
        return _explain_syntax(error, folders)
    match = _IN_FILE.search(str(error)) if isinstance(error, ConfigCompositionException) else None
    if match is None:
        return None
    paths = [folder / f"{match['config']}{suffix}" for folder in folders for suffix in (".yaml", ".yml")]
    path = next((path for path in paths if path.is_file()), None)
    return None if path is None else _File(path, match["config"]).explain(str(error))


def _explain_syntax(error: MarkedYAMLError, folders: Sequence[Path]) -> ConfigError | None:
    mark = error.problem_mark or error.context_mark
    if mark is None or not any(Path(mark.name).is_relative_to(folder) for folder in folders):
        return None
    folder = next(folder for folder in folders if Path(mark.name).is_relative_to(folder))
    group, name = _choice(Path(mark.name).relative_to(folder).with_suffix("").as_posix())
    return ConfigError(
        group, name, f"{mark.name}, line {mark.line + 1}: not YAML ({error.problem}): correct that line"
    )


def _choice(config: str) -> tuple[str, str]:
    """Split `experiment/mine` as a command line would write it; a file at the top is a --config-name."""
    group, slash, name = config.rpartition("/")
    return (group, name) if slash else ("--config-name", name)


class _File:
    """One YAML file of the user's, with its nodes, which know their lines."""

    def __init__(self, path: Path, config: str) -> None:
        self._path = path
        self._config = config
        try:
            self._root: Node | None = compose_nodes(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, YAMLError):
            self._root = None

    def explain(self, message: str) -> ConfigError:
        if not isinstance(self._root, MappingNode):
            return self._refuse(*_choice(self._config), "must hold keys, one `key: value` a line", None)
        if group := _NO_GROUP.search(message):
            return self._explain_group(group["group"])
        if section := _NO_SECTION.search(message):
            return self._explain_section(section["section"], section["value"])
        key = _FULL_KEY.search(message)
        if key is None:
            return self._refuse(*_choice(self._config), _cause(message), None)
        return self._explain_key(key["key"])

    def _explain_group(self, group: str) -> ConfigError:
        from harness.compose import group_names

        hint = did_you_mean(group, group_names()) or f"; there are {', '.join(group_names())}"
        return self._refuse("defaults", f"override /{group}", f"no such group{hint}", self._word(group))

    def _explain_section(self, type_name: str, value: str) -> ConfigError:
        from harness.schema import Config

        key = next(key for key, hint in walk_types(Config) if getattr(hint, "__name__", "") == type_name)
        example = next(name for name in field_names(Config) if name.startswith(f"{key}."))
        remedy = f"holds keys of its own: write them indented below it, such as {example}"
        return self._refuse(key, value, remedy, self._node(key))

    def _explain_key(self, key: str) -> ConfigError:
        from harness.explain import unknown_key
        from harness.schema import Config

        node = self._node(key)
        value = node.value if isinstance(node, ScalarNode) else "..."
        if key == self._config.partition("/")[0] and key not in field_names(Config):
            remedy = "its keys would go below a key of that name: let the file begin with # @package _global_"
            return self._refuse(*_choice(self._config), remedy, None)
        if key not in field_names(Config):
            return self._refuse(key, value, unknown_key(key, value).remedy, node)
        return self._refuse(key, value, f"give {type_words(Config, key)}", node)

    def _refuse(self, key: str, value: Any, remedy: str, node: Node | None) -> ConfigError:
        line = "" if node is None else f", line {node.start_mark.line + 1}"
        return ConfigError(key, value, f"{remedy} ({self._path}{line})")

    def _node(self, key: str) -> Node | None:
        """Return the value of a dotted key; the file may leave out the first parts, as its package does."""
        parts = re.sub(r"\[\d+\]", "", key).split(".")
        found = (_descend(self._root, parts[start:]) for start in range(len(parts)))
        return next((node for node in found if node is not None), None)

    def _word(self, word: str) -> Node | None:
        words = [node for node in _scalars(self._root) if word in re.split(r"[\s/@]", node.value)]
        return next(iter(words), None)


def _descend(node: Node | None, parts: Sequence[str]) -> Node | None:
    for part in parts:
        if not isinstance(node, MappingNode):
            return None
        node = next((value for name, value in node.value if name.value == part), None)
    return node


def _scalars(node: Node | None) -> Iterator[ScalarNode]:
    if isinstance(node, ScalarNode):
        yield node
    elif node is not None:
        for child in node.value:
            for part in child if isinstance(child, tuple) else (child,):
                yield from _scalars(part)


def _cause(message: str) -> str:
    """Return the first line that says what was wrong, without Hydra's words about its own work."""
    lines = [_IN_FILE.sub("", line).strip() for line in message.splitlines()]
    return next((line for line in lines if line and "while composing" not in line), "does not compose")
