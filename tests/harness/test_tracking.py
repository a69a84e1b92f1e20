"""A recorded folder becomes one W&B run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.floor import Floor
from harness.offline_run import is_complete
from harness.record import JobRecord, Status
from harness.record_reader import read_bench_serve, read_result
from harness.tracking import main, publish, run_tags
from harness.tracking_content import MAX_STEPS_LOGGED, History, log_steps
from tests.harness.job_folder import (
    CAPTURE_SIZES,
    CONFIG,
    ENVIRONMENT,
    NUM_STEPS,
    step_row,
    with_tracking,
    write_job,
)
from tests.harness.wandb_file import OfflineRun, read_run

ROOT = Path(__file__).parents[2]
SECRET = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Published:
    job_dir: Path
    outcome: dict[str, Any]
    run: OfflineRun


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """One finished job, published once; its configuration holds a secret."""
    job_dir = tmp_path_factory.mktemp("jobs") / "good"
    write_job(job_dir, config=CONFIG | {"model": CONFIG["model"] | {"hf_token": SECRET}})
    outcome = publish(job_dir)
    assert outcome["status"] == "ok", outcome["reason"]
    return Published(job_dir, outcome, read_run(Path(outcome["dir"])))


class TestAPublishedJob:
    def test_is_noted_in_the_record(self, published: Published) -> None:
        result = read_result(published.job_dir)
        assert result["wandb"] == published.outcome
        assert (result["status"], result["wandb"]["reason"], result["wandb"]["mode"]) == (
            "ok",
            None,
            "offline",
        )
        assert Path(result["wandb"]["dir"]).is_relative_to(published.job_dir)

    def test_keeps_its_configuration_nested_as_composed_with_the_environment(
        self, published: Published
    ) -> None:
        config = {key: value for key, value in published.run.config.items() if key != "_wandb"}
        expected = CONFIG | {"model": CONFIG["model"] | {"hf_token": "***"}, "environment": ENVIRONMENT}
        assert config == expected

    def test_holds_no_secret_in_any_file(self, published: Published) -> None:
        files = [path for path in Path(published.outcome["dir"]).rglob("*") if path.is_file()]
        assert files
        assert not [path for path in files if SECRET.encode() in path.read_bytes()]

    def test_belongs_to_its_sweep_with_its_phases_and_choices(self, published: Published) -> None:
        run = published.run
        assert (run.project, run.group, run.job_type) == (
            "tests",
            "sweep-7",
            "capture+parity+size_sweep+workload",
        )
        assert {"model=tiny", "capture=explicit", "padding=nearest", "emulated", "mine"} <= set(run.tags)

    def test_binds_each_metric_to_its_axis(self, published: Published) -> None:
        bound = published.run.step_metrics
        assert (bound["steps/*"], bound["sizes/*"], bound["captures/*"]) == (
            "step",
            "batch_size",
            "capture_size",
        )

    def test_logs_steps_sizes_and_captures_with_their_axis(self, published: Published) -> None:
        history = published.run.history
        steps = [row for row in history if any(key.startswith("steps/") for key in row)]
        assert [row["step"] for row in steps] == list(range(NUM_STEPS))
        graph = {
            row["batch_size"]: row["sizes/graph/step_ms_p50"]
            for row in history
            if "sizes/graph/step_ms_p50" in row
        }
        assert graph == {1: 1.5, 3: 1.5, 8: 1.5}
        captures = {
            row["capture_size"]: row["captures/pool_bytes"] for row in history if "captures/pool_bytes" in row
        }
        assert captures == {size: 4096 * size for size in CAPTURE_SIZES}

    def test_leaves_out_what_was_not_measured(self, published: Published) -> None:
        keys = {key for row in published.run.history for key in row}
        assert "captures/device_bytes" not in keys and "steps/host_exposed_us" not in keys

    def test_logs_at_a_step_that_only_grows(self, published: Published) -> None:
        steps = [row["_step"] for row in published.run.history]
        assert steps == list(range(len(steps)))

    def test_has_its_tables_and_plots(self, published: Published) -> None:
        logged = {
            key: value
            for row in published.run.history
            for key, value in row.items()
            if isinstance(value, dict)
        }
        assert {name: logged[name]["nrows"] for name in ("capture", "sizes", "requests")} == {
            "capture": len(CAPTURE_SIZES),
            "sizes": 6,
            "requests": 20,
        }
        panels = published.run.config["_wandb"]["visualize"]
        latency = panels["latency_against_batch_size"]["panel_config"]
        assert latency["fieldSettings"]["x"] == "batch_size"
        assert "(emulated)" in latency["stringSettings"]["title"]
        assert panels["memory_against_capture_size"]["panel_config"]["fieldSettings"]["x"] == "capture_size"

    def test_has_the_summary_of_bench_serve_and_the_figures_to_compare_it_by(
        self, published: Published
    ) -> None:
        scalars = published.run.scalars()
        own = {key: scalars.pop(key) for key in list(scalars) if key.startswith(("figures/", "job/"))}
        assert scalars == read_bench_serve(published.job_dir)
        expected = {
            "job/status": "ok",
            "job/failed": 0,
            "figures/mean_decode_ms": 2.0,
            "figures/largest_step_ms": 1.5,
            "figures/num_sizes": len(CAPTURE_SIZES),
        }
        assert expected.items() <= own.items()
        assert own["figures/graph_mib"] == pytest.approx(
            sum(4096 * size + 512 for size in CAPTURE_SIZES) / 1024**2
        )
        assert "failure" not in published.run.summary

    def test_opens_in_the_terminal_viewer_of_wandb(self, published: Published) -> None:
        shown = wandb_cli("leet", "inspect", "--summary", "--json", published.outcome["dir"])
        if shown.returncode and "No such command" in shown.stderr:
            pytest.skip("this W&B has no terminal viewer")
        assert shown.returncode == 0, shown.stderr
        text = json.dumps(json.loads(shown.stdout))
        assert published.run.run_id in text and "figures/mean_decode_ms" in text

    def test_carries_the_record_as_an_artifact(self, published: Published) -> None:
        assert set(published.run.artifacts["record"]) == {
            "result.json", "capture.csv", "sizes.csv", "prefill.csv", "ragged.csv", "loop.csv", "steps.parquet", "requests.parquet",
            "samples.parquet", "profile.csv", "bench_serve.json",
        }  # fmt: skip

    def test_ends_with_exit_code_zero(self, published: Published) -> None:
        assert published.run.exit_code == 0

    def test_is_not_published_twice(self, published: Published) -> None:
        assert publish(published.job_dir) == published.outcome
        assert len(list((published.job_dir / "wandb").glob("offline-run-*"))) == 1

    def test_does_not_merge_with_the_next_job_of_the_process(
        self, published: Published, tmp_path: Path
    ) -> None:
        write_job(tmp_path / "second", status=Status.PARITY_FAILED, num_steps=4, verified=False)
        second = read_run(Path(publish(tmp_path / "second")["dir"]))
        assert second.run_id != published.run.run_id
        assert len([row for row in second.history if "steps/step_ms" in row]) == 4
        assert second.exit_code == 1
        assert "unverified" in second.tags
        assert read_run(Path(published.outcome["dir"])).exit_code == 0


def test_a_killed_job_is_published_from_another_process_with_what_it_left(tmp_path: Path) -> None:
    write_job(tmp_path, finish=False)
    JobRecord.attach(tmp_path).update(status=Status.KILLED)
    command = [sys.executable, "-m", "harness.tracking", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    run = read_run(Path(read_result(tmp_path)["wandb"]["dir"]))
    assert run.exit_code == 1
    assert len([row for row in run.history if "steps/step_ms" in row]) == NUM_STEPS
    assert "parts/steps.jsonl" in run.artifacts["record"]
    assert run.scalars() == {"job/status": "killed", "job/failed": 1}
    assert run.summary["failure"]["nrows"] == 1


def test_one_command_lists_all_offline_runs_of_a_sweep_to_sync(published: Published, tmp_path: Path) -> None:
    """`wandb sync SWEEP/*/wandb/offline-run-*`, as the page on clusters says."""
    write_job(tmp_path / "second", num_steps=4)
    folders = [published.outcome["dir"], publish(tmp_path / "second")["dir"]]
    listed = wandb_cli("sync", "--dry-run", *folders)
    assert listed.returncode == 0, listed.stderr
    assert all(Path(folder).name in listed.stdout + listed.stderr for folder in folders)


def test_a_disabled_mode_writes_nothing(tmp_path: Path) -> None:
    write_job(tmp_path, config=with_tracking(mode="disabled"))
    assert publish(tmp_path)["status"] == "disabled"
    assert not (tmp_path / "wandb").exists()


def test_the_command_names_a_folder_without_a_record_and_publishes_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(tmp_path / "job", config=with_tracking(mode="disabled"))
    assert main([str(tmp_path), str(tmp_path / "job")]) == 2
    shown = capsys.readouterr()
    assert "holds no result.json" in shown.err and f"{tmp_path / 'job'}: disabled" in shown.out
    assert main(["--help"]) == 0 and main(["--halp"]) == 2


def test_a_key_is_looked_for_where_wandb_puts_it(tmp_path: Path) -> None:
    code = """
import sys
from harness.wandb_key import has_key
print(has_key())
"""
    netrc = tmp_path / "netrc"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    environment |= {"NETRC": str(netrc), "WANDB_BASE_URL": "https://wandb.example.org"}
    for machine, expected in (("other.example.org", "False"), ("wandb.example.org", "True")):
        netrc.write_text(f"machine {machine}\n  login user\n  password x\n")
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
        assert (done.stdout.strip(), done.stderr) == (expected, "")


def wandb_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "wandb", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


@dataclass
class Log:
    """What History needs of a run."""

    rows: list[tuple[int, dict[str, Any]]] = field(default_factory=list)

    def log(self, values: dict[str, Any], step: int) -> None:
        self.rows.append((step, values))


def test_a_long_workload_is_thinned_evenly_for_wandb() -> None:
    log = Log()
    log_steps(History(log), [step_row(step) for step in range(5 * MAX_STEPS_LOGGED)])  # type: ignore[arg-type]
    assert [values["step"] for _, values in log.rows] == list(range(0, 5 * MAX_STEPS_LOGGED, 5))


def test_a_tag_is_never_longer_than_wandb_takes() -> None:
    config = CONFIG | {"model": {"name": "m" * 100}}
    tags = run_tags({"config": config, "graph_backend": "cuda", "parity": {"verified": True}})
    assert max(map(len, tags)) == 64 and "cuda" in tags and "unverified" not in tags


def test_a_torn_run_file_is_not_complete(published: Published, tmp_path: Path) -> None:
    (whole,) = Path(published.outcome["dir"]).glob("*.wandb")
    torn = tmp_path / "torn.wandb"
    torn.write_bytes(whole.read_bytes()[:-20])
    assert is_complete(whole) and not is_complete(torn)
    torn.write_bytes(b"")
    assert not is_complete(torn)


def test_a_relative_folder_is_recorded_as_an_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job(tmp_path / "job")
    monkeypatch.chdir(tmp_path)
    assert Path(publish("job")["dir"]).is_relative_to(tmp_path / "job")


def test_decode_steps_are_logged_as_a_share_of_the_floor() -> None:
    logged: list[dict[str, Any]] = []
    history = History(SimpleNamespace(log=lambda values, step: logged.append(values)))  # type: ignore[arg-type]
    log_steps(
        history, [step_row(0) | {"num_kv_tokens": 10}, step_row(1) | {"num_kv_tokens": 10}], Floor(0, 1, 1e4)
    )
    assert "steps/roofline_fraction" not in logged[0], "a prefill step has another floor"
    assert logged[1]["steps/roofline_fraction"] == pytest.approx(1.0 / 2.0)
