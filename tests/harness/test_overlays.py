"""The experiments of a first tour: each runs, and shows what its comment says."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from harness.compose import compose, config_folder, group_choices
from harness.experiment import run_job
from harness.model_cache import is_fetched
from harness.progress import Progress
from harness.record import Status
from harness.record_reader import read_result, read_stream
from harness.schema import check, load_config

TOUR = {
    "quick",
    "real_model",
    "azure_conversation",
    "capture_lists",
    "padding_strategies",
    "compile_worth_it",
    "ceiling_feedback",
}
#: Cuts every overlay short; what it shows must not hang on the numbers cut.
SHORT = [
    "tracking=disabled",
    "measure.timeout_s=0.02",
    "measure.batch_sizes=[3]",
    "measure.prefill_tokens=[32]",
    "parity.batch_sizes=[3]",
    "workload.max_requests=6",
    "model.max_seq_len=80",
]
#: One layer is enough where the weights are random.
TINY = ["model.config.num_hidden_layers=1"]
#: An overlay that shows a course over time keeps it; a real model is cut shorter.
OWN = {
    "real_model": [
        "runner.max_batch_size=2",
        "measure=none",
        "measure.batch_sizes=[]",
        "parity.batch_sizes=[1]",
        "workload.max_requests=2",
    ],
    "azure_conversation": ["runner.max_batch_size=4", *TINY],
    "ceiling_feedback": [
        "workload.max_requests=90",
        "workload.burst_at_s=0.8",
        "parity.enabled=false",
        *TINY,
    ],
}


def overlay(name: str) -> str:
    return config_folder().joinpath(f"experiment/{name}.yaml").read_text(encoding="utf-8")


def points(name: str) -> list[tuple[str, ...]]:
    """The overrides of each job of an overlay: one without sweep parameters, or one a combination."""
    hydra = yaml.safe_load(overlay(name)).get("hydra", {})
    params: dict[str, Any] = hydra.get("sweeper", {}).get("params", {})
    choices = [[f"{key}={value}" for value in str(values).split(",")] for key, values in params.items()]
    return list(itertools.product(*choices))


#: The last point of each sweep; what the others differ in has tests of its own. The short suite compiles by Inductor and
#: loads trained weights in other files: on a fresh machine each takes half a minute.
JOBS = [
    *(
        (name, points(name)[-1])
        for name in sorted(TOUR - {"ceiling_feedback", "compile_worth_it", "real_model"})
    ),
    ("compile_worth_it", points("compile_worth_it")[0]),
    pytest.param("compile_worth_it", points("compile_worth_it")[-1], marks=pytest.mark.long),
    pytest.param("real_model", (), marks=pytest.mark.long),
]


def run_short(name: str, job_dir: Path, *overrides: str) -> Path:
    if name == "real_model" and not is_fetched("smollm2_135m"):
        pytest.skip("the weights are not here: make smollm2")
    config = compose([f"experiment={name}", *SHORT, *OWN.get(name, TINY), *overrides])
    check(load_config(config))
    assert run_job(config, job_dir, Progress(quiet=True)) is Status.OK, read_result(job_dir)["error"]
    return job_dir


def test_the_tour_is_complete() -> None:
    assert set(group_choices("experiment")) >= TOUR


@pytest.mark.parametrize("name", sorted(TOUR))
def test_an_overlay_says_in_a_comment_what_it_shows_and_how_long_it_takes(name: str) -> None:
    first, *others = [line for line in overlay(name).splitlines() if line.startswith("#")][1:]
    assert re.search(r"\(\d+ (s|min)\b.*\)", first), first
    assert others, "what it shows"
    assert ("python -m harness -m experiment=" in overlay(name)) == bool(points(name)[0])


@pytest.mark.parametrize(
    ("name", "point"), JOBS, ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_an_overlay_runs(name: str, point: tuple[str, ...], tmp_path: Path) -> None:
    run_short(name, tmp_path, *point)
    assert len(read_stream(tmp_path, "requests")) == (2 if name == "real_model" else 6)


@pytest.mark.parametrize("name", sorted(name for name in TOUR if points(name)[0]))
def test_every_point_of_a_sweep_composes(name: str) -> None:
    for point in points(name):
        check(load_config(compose([f"experiment={name}", *point])))


def test_every_capture_list_gets_the_same_batches_and_wastes_its_own_share(tmp_path: Path) -> None:
    names = ("all", "max_only")
    jobs = [run_short("capture_lists", tmp_path / name, f"capture={name}") for name in names]
    columns = ["clock_ms", "phase", "batch_size", "num_kv_tokens"]
    first, second = (read_stream(job, "steps")[columns] for job in jobs)
    assert first.equals(second)
    waste = [read_result(job)["workload"]["padding_waste"] for job in jobs]
    assert waste[0] == 0.0 < waste[1]


def test_the_azure_overlay_takes_the_trace_itself(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = (f"2023-11-16 18:15:{second}.6805900,30,{second}\n" for second in range(10, 30))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))
    job = run_short("azure_conversation", tmp_path / "job", "workload=trace", f"workload.path={trace}")
    assert read_stream(job, "requests")["output_len"].tolist() == [10, 11, 12, 13, 14, 15]


def decode_steps(job_dir: Path) -> pd.DataFrame:
    steps = read_stream(job_dir, "steps")
    return steps[steps["phase"] == "decode"]


def between(steps: pd.DataFrame, start_s: float, end_s: float) -> pd.DataFrame:
    return steps[steps["clock_ms"].between(start_s * 1e3, end_s * 1e3)]


def test_below_the_ceiling_a_burst_moves_the_load_to_a_second_stable_batch_for_good(tmp_path: Path) -> None:
    job = run_short("ceiling_feedback", tmp_path, "capture.max_size=8")
    result, steps = read_result(job), decode_steps(job)
    low, high = result["workload"]["statistics"]["stable_batches"]
    before, after = between(steps, 0.4, 0.8), between(steps, 1.9, 2.9)
    assert set(before["mode"]) == {"graph"}
    assert set(after["mode"]) == {"eager"}
    assert set(after["reason"]) == {"above_max"}
    assert before["batch_size"].mean() == pytest.approx(low, rel=0.05)
    assert after["batch_size"].mean() == pytest.approx(high, rel=0.05)
    forecast, fallback = result["warnings"]
    assert f"about {low:.1f} and of about {high:.1f} are both stable" in forecast
    assert "runs eager: it is above the largest capture size, 8. Raise capture.max_size" in fallback


def test_without_the_burst_the_same_rate_never_leaves_the_graphs(tmp_path: Path) -> None:
    job = run_short("ceiling_feedback", tmp_path, "capture.max_size=8", "workload.burst_size=0")
    assert set(decode_steps(job)["mode"]) == {"graph"}


def test_with_the_ceiling_raised_the_load_comes_back_from_the_burst(tmp_path: Path) -> None:
    job = run_short("ceiling_feedback", tmp_path, "capture.max_size=24")
    steps = decode_steps(job)
    (only,) = read_result(job)["workload"]["statistics"]["stable_batches"]
    assert set(steps["mode"]) == {"graph"}
    assert steps["batch_size"].max() > 16
    assert between(steps, 1.9, 2.9)["batch_size"].mean() == pytest.approx(only, rel=0.05)
