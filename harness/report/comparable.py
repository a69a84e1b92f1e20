"""Which two jobs may be compared, and the series of samples that they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.errors import ConfigError
from harness.record import RESULT_FILE, RecordError, Status
from harness.record_reader import job_folders, read_result, read_table
from harness.stats import undisturbed

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Parts of the record that decide how long a step takes and that a comparison is not about.
_LIKE = (
    "environment.device", "environment.device_name", "environment.num_multiprocessors",
    "environment.driver", "environment.cuda", "environment.world_size", "environment.versions.torch",
    "environment.versions.triton", "environment.versions.flashinfer-python",
    "environment.versions.transformers", "model.model_type", "model.fingerprint", "model.dtype",
    "model.num_params", "model.num_layers", "model.hidden_size", "model.vocab_size",
)  # fmt: skip
#: They matter where the CPU does the arithmetic; a GPU's host is told by its name alone.
_LIKE_ON_CPU = ("environment.cpu", "environment.num_cpus", "environment.torch_num_threads")
#: Settings that say where a job ran, who watched and what came after the timing, not what it measured.
_NOT_MEASURED = ("output_dir", "tracking", "job", "sweep", "measure.profile")
#: What of samples.parquet is read.
_COLUMNS = ["context_len", "batch_size", "padded_batch_size", "mode", "graph_backend", "timing", "step_ms",
            "replay_ms", "preempted"]  # fmt: skip


@dataclass(frozen=True)
class Point:
    """What was timed: one row of `sizes.csv` by the key that two jobs share."""

    context_len: int
    batch_size: int
    mode: str


class Metric(StrEnum):
    """What of a step is compared. STEP: from the call, or in flight from the step before, until the tokens
    can be read. REPLAY: between two events on the stream around it. BACK_TO_BACK: the pace of steps
    launched in a row; a run has one figure of it."""

    STEP = "step"
    REPLAY = "replay"
    BACK_TO_BACK = "back_to_back"


@dataclass(frozen=True)
class Series:
    """The samples of a point: by metric, in ms and in the order of measuring. A metric without any is left out."""

    padded_batch_size: int | None
    graph_backend: str | None
    samples_ms: Mapping[Metric, NDArray[np.float64]]


@dataclass(frozen=True)
class Side:
    """One run of one of the two sides."""

    label: str
    path: Path
    result: Mapping[str, Any]
    series: Mapping[Point, Series]


def load_runs(label: str, text: str) -> list[Side]:
    """Read one side: the folder of a job, several with commas between, or a folder of jobs; all of them
    runs of the same thing. Raises ConfigError if they are not, or if there is none."""
    runs = [load_side(label, path) for path in _job_folders(label, text)]
    for other in runs[1:]:
        unlike = [*config_differences(runs[0], other), *differences(runs[0], other)]
        if unlike:
            raise ConfigError(
                label, other.path, f"is no repeat of {runs[0].path}; give runs of one configuration only:\n  "
                + "\n  ".join(unlike),
            )  # fmt: skip
    return runs


def _job_folders(label: str, text: str) -> list[Path]:
    folders: list[Path] = []
    for path in map(Path, filter(None, text.split(","))):
        jobs = [] if (path / RESULT_FILE).exists() else job_folders(path)
        ended = [job for job in jobs if read_result(job)["status"] == Status.OK]
        if jobs and not ended:
            raise ConfigError(label, path, "none of its jobs ended ok; give one that did")
        folders += ended or [path]
    return folders


def load_side(label: str, path: Path) -> Side:
    """Read a job. Raises ConfigError if `path` is not the folder of a job with samples."""
    try:
        return Side(label, path, read_result(path), _series(path))
    except RecordError as error:
        raise ConfigError(label, path, str(error)) from error


def _series(path: Path) -> dict[Point, Series]:
    """Split the samples by point. Of several plans of one mode the first counts: the one in force."""
    table = read_table(path, "samples")
    by_point: dict[Point, list[Mapping[str, Any]]] = {}
    for row in table.select(_COLUMNS).to_pylist():
        point = Point(row["context_len"] or 0, row["batch_size"], row["mode"])
        rows = by_point.setdefault(point, [])
        if not rows or rows[0]["padded_batch_size"] == row["padded_batch_size"]:
            rows.append(row)
    return {point: _series_of(rows) for point, rows in by_point.items()}


def _series_of(rows: list[Mapping[str, Any]]) -> Series:
    alone = [row for row in rows if row["timing"] != Metric.BACK_TO_BACK]
    in_a_row = [row for row in rows if row["timing"] == Metric.BACK_TO_BACK]
    samples_ms = {
        Metric.STEP: _counted(alone, "step_ms"),
        Metric.REPLAY: _counted(alone, "replay_ms"),
        Metric.BACK_TO_BACK: _counted(in_a_row, "step_ms"),
    }
    kept = {metric: samples for metric, samples in samples_ms.items() if len(samples)}
    return Series(rows[0]["padded_batch_size"], rows[0]["graph_backend"], kept)


def _counted(rows: list[Mapping[str, Any]], name: str) -> NDArray[np.float64]:
    """The samples of a column, less those that another process disturbed."""
    told = [row for row in rows if row[name] is not None and row[name] > 0]
    return np.array([told[index][name] for index in undisturbed([row["preempted"] for row in told])])


def check_comparable(a: Side, b: Side, allow_unverified: bool, allow_unlike: bool) -> None:
    """Raise ConfigError for a comparison that would mislead; each message says what allows it."""
    for side in (a, b):
        _refuse_emulated(side)
        if not allow_unverified:
            _refuse_unverified(side)
    unlike = list(differences(a, b))
    if unlike and not allow_unlike:
        listed = "\n  ".join(unlike)
        raise ConfigError(
            "B",
            b.path,
            f"ran elsewhere than A ({a.path}); add --allow-unlike to compare all the same:\n  {listed}",
        )


def _refuse_emulated(side: Side) -> None:
    if side.result["graph_backend"] == "emulated":
        raise ConfigError(
            side.label, side.path, "its graphs were emulated, so its latencies say nothing about CUDA graphs; "
            "run it on a GPU, or with runner=eager to compare eager steps on a CPU",
        )  # fmt: skip


def _refuse_unverified(side: Side) -> None:
    if not is_verified(side):
        raise ConfigError(
            side.label, side.path, "is UNVERIFIED: its replay was not proven equal to eager; run it with "
            "parity.enabled=true, or add --allow-unverified",
        )  # fmt: skip


def is_verified(side: Side) -> bool:
    """Whether parity passed in the job."""
    return bool((side.result["parity"] or {}).get("verified"))


def differences(a: Side, b: Side) -> Iterator[str]:
    """Yield what of the machine, its software and the model differs: `name: in A → in B`."""
    on_cpu = _at(a.result, "environment.device") == "cpu"
    for name in (*_LIKE, *(_LIKE_ON_CPU if on_cpu else ())):
        before, after = _at(a.result, name), _at(b.result, name)
        if before != after:
            yield f"{name}: {before} → {after}"


def config_differences(a: Side, b: Side) -> Iterator[str]:
    """Yield the settings that differ: `key: in A → in B`."""
    before, after = flat(a.result["config"] or {}), flat(b.result["config"] or {})
    for key in sorted(before.keys() | after.keys()):
        is_measured = key not in _NOT_MEASURED and key.split(".")[0] not in _NOT_MEASURED
        if is_measured and before.get(key) != after.get(key):
            yield f"{key}: {before.get(key)} → {after.get(key)}"


def _at(record: Mapping[str, Any], name: str) -> Any:
    value: Any = record
    for part in name.split("."):
        value = (value or {}).get(part)
    return value


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested mapping as one of dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= flat(value, f"{prefix}{key}.")
        else:
            leaves[prefix + key] = value
    return leaves
