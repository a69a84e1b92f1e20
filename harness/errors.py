"""What a user did that cannot run: always field, value and remedy."""

from __future__ import annotations


class ConfigError(ValueError):
    """A value in the configuration or on the command line cannot be used.

    Shown without a traceback and mapped to exit code 2. `field` is the dotted key or the option, `value` what
    was given (as text; None for an option that was left out), `remedy` the sentence that says what to write
    instead.
    """

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field = field
        self.value = value
        self.remedy = remedy
        is_key = not field.startswith(("--", "python -m"))
        given = f"{field}={as_written(value)}" if is_key or value is not None else field
        super().__init__(f"{given}: {remedy}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        return type(self), (self.field, self.value, self.remedy)


class RecordError(ValueError):
    """A record cannot be read or written as asked; the message says why and what to do."""


class NewerRecordError(RecordError):
    """A record is whole, but a newer version of the harness wrote it."""


def unwritable(folder: object, error: OSError) -> ConfigError:
    """Return the ConfigError for a job's folder that cannot be made or written."""
    reason = error.strerror or type(error).__name__
    return ConfigError("output_dir", folder, f"{reason}: give a folder that can be written")


def used_folder(folder: object) -> ConfigError:
    """Return the ConfigError for a job's folder that holds another record."""
    return ConfigError(
        "output_dir", folder, "holds a record already: give another folder, or remove what is in it"
    )


def as_written(value: object) -> str:
    """Return `value` as the command line spells it: `[1,2,4]`, `true`, `null`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(as_written(item) for item in value) + "]"
    return str(value)
