"""300 random command lines: each runs or is refused with a remedy.

What composes is really run, cut short by `SHORT`; a sweep's jobs run here instead of in one child each.
Most of the lines take minutes and are marked `long`: make test-long.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from harness.__main__ import main
from harness.fields import field_names
from harness.isolation import CONFIG_FILE
from harness.record import RESULT_FILE, Status
from harness.record_reader import read_result
from harness.schema import Config

_NUM_LINES, _NUM_PARTS = 300, 12
#: Stands before a line's own overrides, less those that the line names itself.
SHORT = {
    "model.config.num_hidden_layers": "1",
    "model.max_seq_len": "64",
    "runner.max_batch_size": "3",
    "capture.policy": "max_only",
    "measure.enabled": "false",
    "measure.min_samples": "2",
    "measure.min_time_s": "0",
    "measure.timeout_s": "0.01",
    "parity.batch_sizes": "[1]",
    "workload.max_requests": "2",
    "workload.prompt_len": "16",
    "workload.output_len": "4",
    "tracking.mode": "disabled",
    "job.timeout_s": "20",
}
_KEYS = [
    *(key for key in field_names(Config) if key != "output_dir"),
    *("experiment", "model", "capture", "padding", "workload", "tracking", "hydra.verbose", "hydra.job.name"),
    *(
        "model.config.vocab_size",
        "workload.prompt_len.mean",
        "foo",
        "capture/x",
        "model@x",
        "hydra.sweep.subdir",
    ),
]
_VALUES = [
    *(
        "1",
        "0",
        "-1",
        "3.5",
        "true",
        "off",
        "null",
        "abc",
        "[1,2]",
        "[]",
        "1,2",
        "[1,2],[3]",
        "{a:1}",
        "{}",
        "''",
    ),
    *(
        "'a b'",
        "${seed}",
        "${oc.env:NOPE}",
        "range(1,4)",
        "choice(1,2)",
        "1e9",
        "inf",
        "nan",
        "tiny",
        "all",
        "é",
    ),
    *(
        "glob(*)",
        "/nope",
        "interval(0,1)",
        "tag(x,1,2)",
        "shuffle(1,2)",
        "\\",
        "a=b",
        "${now:%Y}",
        "[[1]]",
        "${",
    ),
    *("int(3)", "cast", "999999999999999999999", "[a,b]", "'", "0x10", "???", "vllm", "nearest", "16", "0.5"),
]


def random_line(rng: random.Random) -> list[str]:
    """One to three overrides, some of a sweep."""
    sweep = ["-m"] if rng.random() < 0.4 else []
    pairs = [
        rng.choice(["", "", "", "", "+", "++", "~"]) + rng.choice(_KEYS) + "=" + rng.choice(_VALUES)
        for _ in range(rng.choice([1, 1, 2, 3]))
    ]
    return [*sweep, *pairs]


def cut_short(line: list[str]) -> list[str]:
    """Return `line` behind the overrides of SHORT that it leaves alone."""
    keys = {part.lstrip("+~").partition("=")[0] for part in line}

    def is_left_alone(key: str) -> bool:
        return not any(key == own or key.startswith(f"{own}.") or own.startswith(f"{key}.") for own in keys)

    short = [f"{key}={value}" for key, value in SHORT.items() if is_left_alone(key)]
    return [*line[: line[0] == "-m"], *short, *line[line[0] == "-m" :]]


def _run_here(job_dir: Path, *limits: object) -> Status:
    from harness.experiment import run_job

    return run_job(job_dir / CONFIG_FILE, job_dir)


def ends(folder: Path) -> set[str]:
    """How each job below `folder` ended."""
    return {read_result(result.parent)["status"] for result in folder.rglob(RESULT_FILE)}


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, _NUM_PARTS))]
)
def test_a_random_line_runs_or_is_refused_with_a_remedy(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("harness.point.run_isolated", _run_here)
    rng = random.Random(part)
    for number in range(_NUM_LINES // _NUM_PARTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        line = random_line(rng)
        code = main(cut_short(line))
        errors = capfd.readouterr().err
        assert "Traceback" not in errors, line
        assert ends(folder) <= {"ok", "invalid_config", "timeout"}, (line, errors)
        if code == 2:
            assert errors.startswith("error: ") and len(errors) > len("error: \n"), line
        elif code == 1:
            assert ends(folder) & {"invalid_config", "timeout"}, (line, errors)
        else:
            assert code == 0 and ends(folder) in (set(), {"ok"}), (line, errors)
