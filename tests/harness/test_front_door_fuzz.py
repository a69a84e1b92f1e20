"""300 random command lines: each composes and would run, or is refused with a remedy.

What a composed job does is tested elsewhere; here the job itself is replaced by one that records `ok`, so
that the front door alone answers: parsing, composition, schema, rules, folders, exit codes, sweeps.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from harness.__main__ import main
from harness.fields import field_names
from harness.record import JobRecord, Status
from harness.schema import Config

_NUM_LINES, _NUM_PARTS = 300, 6
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


@pytest.fixture
def ok_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def end_ok(job_dir: Path) -> Status:
        JobRecord(job_dir).update(status=Status.OK)
        return Status.OK

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("harness.experiment.run_job", lambda config, job_dir, progress=None: end_ok(job_dir))
    monkeypatch.setattr("harness.app.run_isolated", lambda job_dir, timeout_s=None: end_ok(job_dir))


@pytest.mark.parametrize("part", range(_NUM_PARTS))
def test_a_random_line_runs_or_is_refused_with_a_remedy(
    part: int, ok_jobs: None, capfd: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(part)
    for _ in range(_NUM_LINES // _NUM_PARTS):
        line = random_line(rng)
        code = main(line)
        errors = capfd.readouterr().err
        assert code in (0, 1, 2), line
        assert "Traceback" not in errors, line
        if code == 2:
            assert errors.startswith("error: ") and len(errors) > len("error: \n"), line
        if code == 1:
            assert "-m" in line and "did not end ok" in errors, line
