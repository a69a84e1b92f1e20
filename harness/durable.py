"""Files that survive a kill: one replaced as a whole, and one that only grows by whole lines."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.plain import to_plain


def replace_file(path: Path, data: bytes) -> None:
    """Give `path` the content `data`: a reader sees the old file or the new one, never a part.

    Raises OSError (disk full, no rights) and then leaves the old file as it was.
    """
    # On a shared file system another machine may have a process of this very number.
    draft = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def check_output(option: str, path: Path) -> None:
    """Raise ConfigError if the file that the user will want by `option` has no folder that can be written."""
    if not path.parent.is_dir():
        raise ConfigError(option, path, f"there is no folder {path.parent}")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(option, path, "cannot be written")


def write_output(option: str, path: Path, text: str) -> None:
    """Write the file that the user asked for by `option`. Raises ConfigError where that is not possible."""
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise ConfigError(option, path, f"cannot be written: {error.strerror}") from error


class Reserve:
    """A file that only takes room, so that a full disk still holds the last word about a job."""

    #: A last `result.json` with a long traceback fits.
    _BYTES = 64 * 1024

    def __init__(self, path: Path) -> None:
        self._path = path

    def take(self) -> None:
        """Take the room. Raises OSError where there is none."""
        self._path.parent.mkdir(exist_ok=True)
        self._path.write_bytes(os.urandom(self._BYTES))  # what does not compress

    def give_back(self) -> None:
        """Leave the room to others."""
        self._path.unlink(missing_ok=True)
        remove_if_empty(self._path.parent)


class LineFile:
    """Rows as JSON objects, one a line, each handed to the operating system before `append` returns.

    A process that dies loses nothing it appended: at worst the last line is torn, and readers leave
    it out. The first line is a header with the schema version. An append costs one write call (about
    10 µs); nothing is synchronised to the disk, since only a power cut could lose it.
    """

    def __init__(self, path: Path, header: Mapping[str, object]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0)
        self._encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=to_plain).encode
        self._write(self._encode(dict(header)) + "\n")

    def append(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Write `rows`, all in one call."""
        self._write("".join([self._line(row) for row in rows]))

    def _line(self, row: Mapping[str, object]) -> str:
        try:
            return self._encode(row) + "\n"
        except ValueError:  # not finite: what has no value is null
            return self._encode(to_plain(row)) + "\n"

    def _write(self, text: str) -> None:
        data = text.encode()
        written = self._file.write(data)
        if written != len(data):
            # NOTE: a full disk may take a part of a line; cut it off, or the next row would join it.
            self._file.truncate(self._file.tell() - (written or 0))
            self._file.seek(0, os.SEEK_END)
            raise OSError(errno.ENOSPC, "only a part of the rows could be written", str(self._file.name))

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> tuple[dict[str, Any] | None, bytes]:
    """Return a line file's header and the bytes of its whole rows, without a torn last line.

    The header is None if the writer died before it had written it.
    """
    whole = path.read_bytes().rpartition(b"\n")[0]
    if not whole:
        return None, b""
    head, _, rows = whole.partition(b"\n")
    return json.loads(head), rows + b"\n" if rows else b""
