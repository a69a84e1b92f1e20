"""A histogram of prompt and output lengths, joint: a log's traffic without the log.

A CSV file: lines that begin with `#`, a header, then a row a bin. Both ends of a bin belong to it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from harness.errors import ConfigError
from harness.workload.trace_file import open_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.workload.base import Workload

COLUMNS = ("min_prompt_len", "max_prompt_len", "min_output_len", "max_output_len", "count")
#: The lengths of Azure's conversation trace of 2023, so that a clone needs no download.
SHIPPED = Path(__file__).with_name("data") / "azure_2023_conversation.csv"
#: From a bin's smallest length to that of the next.
_BIN_RATIO = 1.1
_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class LengthHistogram:
    """Bins of requests: how many had a prompt and an output within which lengths."""

    #: `[num_bins, 5]` int64, the columns of the file.
    bins: NDArray[np.int64]

    @classmethod
    def of(cls, workload: Workload) -> Self:
        """Count the requests of `workload` in bins that grow with the length, cut to what lies in them."""
        lengths = np.stack([workload.prompt_len, workload.output_len], axis=1).astype(np.int64)
        of_bin = np.floor(np.log(lengths) / np.log(_BIN_RATIO))
        order = np.lexsort((of_bin[:, 1], of_bin[:, 0]))
        _, start, count = np.unique(of_bin[order], axis=0, return_index=True, return_counts=True)
        low, high = (ends.reduceat(lengths[order], start) for ends in (np.minimum, np.maximum))
        return cls(np.stack([low[:, 0], high[:, 0], low[:, 1], high[:, 1], count], axis=1))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file of bins. Raises ConfigError with the line number of what cannot be used."""
        with open_text(path) as text:
            bins = list(_bins(path, text))
        if not any(row[-1] for row in bins):
            raise ConfigError("workload.path", path, "has no bin with a count; name a histogram with one")
        return cls(np.array(bins, dtype=np.int64))

    def text(self, comment: str = "") -> str:
        """Return the histogram as the text of a file; `comment` says where it comes from."""
        buffer = io.StringIO()
        buffer.writelines(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(self.bins.tolist())
        return buffer.getvalue()

    def sample(
        self, num_requests: int, rng: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Draw prompt and output lengths, `[num_requests]` each: a bin by its count, then evenly within it."""
        count = self.bins[:, 4]
        chosen = self.bins[rng.choice(len(count), num_requests, p=count / count.sum())]
        return (
            rng.integers(chosen[:, 0], chosen[:, 1], endpoint=True),
            rng.integers(chosen[:, 2], chosen[:, 3], endpoint=True),
        )


def _bins(path: str | Path, text: io.TextIOWrapper) -> Iterator[list[int]]:
    """Yield the bins of a file, each checked."""
    header: list[str] | None = None
    reader = csv.reader(text)
    for row in reader:
        if not row or row[0].startswith("#"):
            continue
        if header is None:
            header = [name.strip() for name in row]
            if missing := [name for name in COLUMNS if name not in header]:
                raise _refused(path, reader.line_num, f"lacks {', '.join(missing)}")
        elif len(row) != len(header):
            raise _refused(path, reader.line_num, f"{len(row)} fields where the header has {len(header)}")
        else:
            named = dict(zip(header, row, strict=True))
            yield _checked(path, reader.line_num, [named[name] for name in COLUMNS])


def _checked(path: str | Path, line: int, fields: list[str]) -> list[int]:
    values = []
    for name, field in zip(COLUMNS, fields, strict=True):
        try:
            values.append(int(field))
        except ValueError:
            raise _refused(path, line, f"{name} is {field!r}, not a whole number") from None
        if not (0 if name == "count" else 1) <= values[-1] <= _MAX_TOKENS:
            raise _refused(path, line, f"{name} is {field}: a length is at least 1, a count at least 0")
    for low, high in ((0, 1), (2, 3)):
        if values[low] > values[high]:
            raise _refused(
                path, line, f"{COLUMNS[low]}={values[low]} is more than {COLUMNS[high]}={values[high]}"
            )
    return values


def _refused(path: str | Path, line: int, reason: str) -> ConfigError:
    return ConfigError(
        "workload.path",
        path,
        f"line {line}: {reason}. A histogram has the columns {','.join(COLUMNS)}; "
        "for a request log write workload=trace",
    )
