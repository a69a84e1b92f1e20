"""Keeps secrets out of records, command lines and W&B configs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "***"

_SECRET_WORDS = {
    "token", "secret", "password", "passwd", "passphrase", "credential", "credentials", "apikey",
}  # fmt: skip
_SECRET_PAIRS = {("api", "key"), ("access", "key"), ("private", "key"), ("secret", "key"), ("auth", "key")}

#: Keys as their issuers write them: Hugging Face, W&B, OpenAI-like, GitHub, GitLab, AWS, Slack.
_KNOWN_KEYS = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|wandb_v\d_[A-Za-z0-9_-]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}"
    r"|github_pat_[A-Za-z0-9_]{16,}|glpat-[A-Za-z0-9_-]{16,}|AKIA[A-Z0-9]{16}|xox[a-z]-[A-Za-z0-9-]{10,})"
)
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")
_BEARER = re.compile(r"(?i)(?<=bearer )[A-Za-z0-9._~+/=-]{8,}")
#: `key=value` and `key: value` inside a command line, a message or a traceback.
#: NOTE: possessive and only from a word's start, or a long word costs its length squared.
_ASSIGNMENT = re.compile(
    r"(?<![\w.\-])(?P<key>-*[A-Za-z_][\w.\-]*+)(?P<sign>\s*[=:]\s*)(?P<value>'[^']*'|\"[^\"]*\"|[^\s,}\]]+)"
)
_MIN_SECRET_LENGTH = 8


def names_a_secret(key: str) -> bool:
    """Tell whether a key's last word is one that holds a secret: `hf_token`, `apiKey`, not `max_tokens`."""
    words = re.sub(r"([a-z])([A-Z])", r"\1_\2", key).lower()
    parts = [part for part in re.split(r"[^a-z0-9]+", words) if part]
    return bool(parts) and (parts[-1] in _SECRET_WORDS or tuple(parts[-2:]) in _SECRET_PAIRS)


def scrub(value: Any) -> Any:
    """Return plain `value` with every secret replaced by `***`.

    Secrets are: strings under a key that names one, keys in the form of a known issuer, passwords in
    URLs, and the values of this process's environment variables whose name says so.
    """
    return _scrub(value, environment_secrets())


def scrub_command(argv: Iterable[str]) -> list[str]:
    """Return the command line without secrets: `--api-key VALUE` loses VALUE, `a.token=x` loses x."""
    secrets = environment_secrets()
    return _scrub_words(list(argv), secrets)


def environment_secrets() -> list[str]:
    """Return the values of the environment variables that hold a secret, longest first."""
    found = {
        value
        for key, value in os.environ.items()
        if names_a_secret(key) and len(value) >= _MIN_SECRET_LENGTH and not value.startswith("/")
    }
    return sorted(found, key=len, reverse=True)


def _scrub(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {
            key: HIDDEN
            if names_a_secret(str(key)) and isinstance(item, str) and item
            else _scrub(item, secrets)
            for key, item in value.items()
        }
    if isinstance(value, list):
        is_words = all(isinstance(item, str) for item in value)
        return _scrub_words(value, secrets) if is_words else [_scrub(item, secrets) for item in value]
    return _scrub_text(value, secrets) if isinstance(value, str) else value


def _scrub_words(words: list[str], secrets: list[str]) -> list[str]:
    """Scrub a list of words; one after a bare option that names a secret goes too."""
    options = [False, *(word.startswith("-") and "=" not in word and names_a_secret(word) for word in words)]
    return [
        HIDDEN if after_option else _scrub_text(word, secrets)
        for word, after_option in zip(words, options, strict=False)
    ]


def _scrub_text(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    text = _ASSIGNMENT.sub(_hide_value, text)
    text = _URL_PASSWORD.sub(HIDDEN, text)
    text = _BEARER.sub(HIDDEN, text)
    return _KNOWN_KEYS.sub(HIDDEN, text)


def _hide_value(match: re.Match[str]) -> str:
    if not names_a_secret(match["key"]):
        return match[0]
    return match["key"] + match["sign"] + HIDDEN
