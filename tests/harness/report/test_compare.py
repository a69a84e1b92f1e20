"""The verb compare, on recorded jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigError
from harness.record import JobRecord
from harness.report.comparable import Metric, load_runs, load_side
from harness.report.compare import compare, main
from harness.report.verdict import Verdict
from tests.harness.job_folder import CONFIG, write_job
from tests.harness.report.samples import BATCH_SIZES, GPU, MODEL, write_samples


def verdicts(a: Path, b: Path) -> dict[str, set[str]]:
    rows = compare([load_side("A", a)], [load_side("B", b)]).rows
    return {
        mode: {row.judgement.verdict.value for row in rows if row.point.mode == mode}
        for mode in ("graph", "eager")
    }


def refusal(*arguments: str | Path) -> str:
    with pytest.raises(ConfigError) as caught:
        main([str(argument) for argument in arguments])
    return str(caught.value)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_samples(tmp_path / "a", seed=1)


def test_two_runs_of_the_same_thing_are_the_same(base: Path, tmp_path: Path) -> None:
    assert verdicts(base, write_samples(tmp_path / "b", seed=2)) == {"graph": {"SAME"}, "eager": {"SAME"}}


def test_a_planted_slow_down_of_five_percent_is_found_where_it_was_planted(
    base: Path, tmp_path: Path
) -> None:
    slow = write_samples(tmp_path / "b", seed=2, slow_down=0.05, noise=0.005)
    assert verdicts(base, slow) == {"graph": {"SLOW"}, "eager": {"SAME"}}
    assert verdicts(slow, base) == {"graph": {"FAST"}, "eager": {"SAME"}}


def test_a_slow_down_fails_only_when_asked_to(base: Path, tmp_path: Path, capsys: Any) -> None:
    slow = write_samples(tmp_path / "b", seed=2, slow_down=0.2)
    assert main([str(base), str(slow)]) == 0
    assert main([str(base), str(slow), "--fail-on-slow"]) == 1
    assert main([str(slow), str(base), "--fail-on-slow"]) == 0
    assert "4 SLOW" in capsys.readouterr().out


def test_every_row_says_both_medians_the_change_and_the_interval(
    base: Path, tmp_path: Path, capsys: Any
) -> None:
    main([str(base), str(write_samples(tmp_path / "b", seed=2, slow_down=0.2))])
    row = next(line for line in capsys.readouterr().out.splitlines() if "SLOW" in line).split()
    assert row[:5] == ["128", "graph", "1", "1", "step"]
    assert float(row[5]) == pytest.approx(1.1, rel=0.02)
    assert float(row[6]) == pytest.approx(1.32, rel=0.02)
    low, high = (float(cell.rstrip("%")) for cell in (row[8], row[10]))
    assert low < float(row[7].rstrip("%")) < high


def test_markdown_has_a_table_and_escapes_what_records_say(base: Path, tmp_path: Path, capsys: Any) -> None:
    config = CONFIG | {"seed": "<b>|x"}
    main([str(base), str(write_samples(tmp_path / "b", seed=2, config=config)), "--markdown"])
    out = capsys.readouterr().out
    assert "| context | mode | batch | padded to | metric |" in out
    assert out.count("| graph |") == len(BATCH_SIZES)
    assert "<b>" not in out and "&lt;b>\\|x" in out


def test_settings_that_differ_are_named_and_allowed(base: Path, tmp_path: Path, capsys: Any) -> None:
    other = CONFIG | {"padding": {"strategy": "split", "costs_path": None}, "output_dir": "elsewhere"}
    assert main([str(base), str(write_samples(tmp_path / "b", config=other))]) == 0
    out = capsys.readouterr().out
    assert "setting: padding.strategy: nearest → split" in out
    assert "output_dir" not in out


def test_emulated_graphs_are_refused_whatever_is_allowed(base: Path, tmp_path: Path) -> None:
    write_job(tmp_path / "b", graph_backend="emulated")
    message = refusal(base, tmp_path / "b", "--allow-unverified", "--allow-unlike")
    assert message.startswith("B=") and "emulated" in message


def test_an_unverified_job_is_refused_unless_allowed_and_then_marked(
    base: Path, tmp_path: Path, capsys: Any
) -> None:
    unverified = write_samples(tmp_path / "b", verified=False)
    assert "--allow-unverified" in refusal(base, unverified)
    assert main([str(base), str(unverified), "--allow-unverified"]) == 0
    assert "UNVERIFIED: in B" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        (
            {"environment": GPU | {"device_name": "NVIDIA H100"}},
            "environment.device_name: NVIDIA H200 → NVIDIA H100",
        ),
        (
            {"environment": GPU | {"versions": {"torch": "2.11.0"}}},
            "environment.versions.torch: 2.13.0 → 2.11.0",
        ),
        ({"model": MODEL | {"dtype": "float16"}}, "model.dtype: bfloat16 → float16"),
    ],
)
def test_unlike_machines_versions_and_models_are_refused_unless_allowed(
    base: Path, tmp_path: Path, changes: dict[str, Any], name: str, capsys: Any
) -> None:
    unlike = write_samples(tmp_path / "b", **changes)
    message = refusal(base, unlike)
    assert name in message and "--allow-unlike" in message
    assert main([str(base), str(unlike), "--allow-unlike"]) == 0
    assert f"unlike: {name}" in capsys.readouterr().out


def test_jobs_with_nothing_in_common_are_refused(base: Path, tmp_path: Path) -> None:
    assert "measure.batch_sizes" in refusal(base, write_samples(tmp_path / "b", batch_sizes=(3, 5)))


def test_rows_of_one_job_alone_are_counted(base: Path, tmp_path: Path, capsys: Any) -> None:
    main([str(base), str(write_samples(tmp_path / "b", batch_sizes=(1, 2, 4)))])
    assert "2 rows are in A alone" in capsys.readouterr().out


def test_a_folder_without_a_record_is_refused(base: Path, tmp_path: Path) -> None:
    assert "result.json" in refusal(base, tmp_path / "nowhere")


def test_of_two_plans_of_a_mode_the_one_in_force_is_compared(base: Path) -> None:
    part = base / "parts"
    assert not part.exists()
    point = {"batch_size": 3, "mode": "graph", "context_len": 128, "timing": "isolated"}
    with JobRecord(base) as record:
        for padded in (8, 4):
            rows = [
                point | {"padded_batch_size": padded, "sample": i, "step_ms": float(padded)} for i in range(3)
            ]
            record.append_many("samples", rows)
    (only,) = load_side("A", base).series.values()
    assert only.padded_batch_size == 8 and set(only.samples_ms[Metric.STEP]) == {8.0}


def test_a_job_cut_off_in_its_sweep_is_compared_by_what_it_has(base: Path, tmp_path: Path) -> None:
    cut = write_samples(tmp_path / "b", seed=2, batch_sizes=(1, 2))
    result = json.loads((cut / "result.json").read_text()) | {"status": "killed"}
    (cut / "result.json").write_text(json.dumps(result))
    assert {row.judgement.verdict for row in compare([load_side("A", base)], [load_side("B", cut)]).rows} == {
        Verdict.SAME
    }


def test_comparing_imports_no_torch_and_no_plotly(base: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from harness.report.compare import main; main(sys.argv[1:]); "
        "print(sorted({'torch', 'plotly', 'transformers', 'wandb'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(base), str(base)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_repeats_of_a_side_show_what_re_runs_differ_by(tmp_path: Path) -> None:
    """Offsets of 4% from run to run: three percent stand out of none, and six of no two runs."""
    runs = {
        name: [
            write_samples(tmp_path / f"{name}{index}", seed=10 * index + ord(name), slow_down=offset)
            for index, offset in enumerate(offsets)
        ]
        for name, offsets in {
            "a": (0.0, 0.04, -0.04),
            "b": (0.07, 0.03, 0.11),
            "c": (0.5, 0.46, 0.55),
        }.items()
    }
    names = {name: ",".join(map(str, folders)) for name, folders in runs.items()}
    assert _verdicts(names["a"], names["b"])["graph"] <= {"AMBIGUOUS", "SAME"}
    assert _verdicts(names["a"], names["c"])["graph"] == {"SLOW"}


def _verdicts(a: str, b: str) -> dict[str, set[str]]:
    rows = compare(load_runs("A", a), load_runs("B", b)).rows
    return {
        row.point.mode: {r.judgement.verdict.value for r in rows if r.point.mode == row.point.mode}
        for row in rows
    }


def test_the_folder_of_a_sweep_stands_for_its_jobs(tmp_path: Path, capsys: Any) -> None:
    for side in "ab":
        for index in range(3):
            write_samples(tmp_path / side / str(index), seed=10 * index + ord(side))
    assert [run.path.name for run in load_runs("A", str(tmp_path / "a"))] == ["0", "1", "2"]
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    assert "a/0 and 2 repeats of it" in out and "8 SAME" in out


def test_runs_of_a_side_must_be_repeats_of_one_configuration(base: Path, tmp_path: Path) -> None:
    other = write_samples(tmp_path / "c", config=CONFIG | {"padding": {"strategy": "split"}})
    assert "padding.strategy: nearest → split" in refusal(f"{base},{other}", base)


def test_steps_in_flight_are_compared_and_disturbed_samples_are_left_out(base: Path) -> None:
    point = {"batch_size": 3, "mode": "graph", "context_len": 128, "padded_batch_size": 4}
    with JobRecord(base) as record:
        for sample in range(24):
            times = {"step_ms": 9.0 if sample % 3 else 1.0, "preempted": bool(sample % 3)}
            record.append("samples", point | {"timing": "overlapped", "sample": sample} | times)
    (only,) = load_side("A", base).series.values()
    assert only.samples_ms[Metric.STEP].tolist() == [1.0] * 8


def metric_verdicts(a: Path, b: Path, *metrics: Metric) -> dict[tuple[str, str], set[str]]:
    rows = compare([load_side("A", a)], [load_side("B", b)], metrics=metrics).rows
    found: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        found.setdefault((row.point.mode, row.metric.value), set()).add(row.judgement.verdict.value)
    return found


def test_a_noisy_host_does_not_hide_what_the_device_says(tmp_path: Path) -> None:
    runs = [
        write_samples(tmp_path / name, seed=seed, noise=0.6, replay_slow_down=slow_down)
        for seed, (name, slow_down) in enumerate((("a", 0.0), ("again", 0.0), ("slow", 0.05)), start=1)
    ]
    assert metric_verdicts(runs[0], runs[1])["graph", "step"] == {"AMBIGUOUS"}
    assert metric_verdicts(runs[0], runs[1])["graph", "replay"] == {"SAME"}
    assert metric_verdicts(runs[0], runs[2])["graph", "replay"] == {"SLOW"}


def test_replay_is_shown_unasked_only_where_a_cuda_graph_ran(tmp_path: Path) -> None:
    a, b = (write_samples(tmp_path / name, replay_slow_down=0.0) for name in "ab")
    assert set(metric_verdicts(a, b)) == {("graph", "step"), ("graph", "replay"), ("eager", "step")}
    assert set(metric_verdicts(a, b, Metric.REPLAY)) == {("graph", "replay"), ("eager", "replay")}


def test_any_slow_row_fails_whatever_its_metric(tmp_path: Path) -> None:
    a, slow = (
        str(write_samples(tmp_path / str(index), seed=index, replay_slow_down=0.05 * index))
        for index in (0, 1)
    )
    assert main([a, slow, "--fail-on-slow"]) == 1
    assert main([a, slow, "--fail-on-slow", "--metric", "step"]) == 0
    assert main([a, slow, "--fail-on-slow", "--metric", "step", "--metric", "replay"]) == 1


def test_a_metric_without_samples_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    other = write_samples(tmp_path / "b", replay_slow_down=0.0)
    assert "samples of replay" in refusal(base, other, "--metric", "replay")


def test_the_one_figure_a_run_has_of_its_pace_is_judged_by_repeats_only(tmp_path: Path) -> None:
    pace = Metric.BACK_TO_BACK
    a, b = (
        [
            write_samples(tmp_path / f"{name}{i}", back_to_back_slow_down=slow_down + 0.002 * i)
            for i in range(3)
        ]
        for name, slow_down in (("a", 0.0), ("b", 0.05))
    )
    assert metric_verdicts(a[0], b[0], pace)["graph", pace] == {"AMBIGUOUS"}
    sides = [load_runs(name, ",".join(map(str, runs))) for name, runs in (("A", a), ("B", b))]
    assert {row.judgement.verdict for row in compare(*sides, metrics=[pace]).rows} == {Verdict.SLOW}
    assert {row.judgement.verdict for row in compare(sides[0], sides[0], metrics=[pace]).rows} == {
        Verdict.SAME
    }


def test_the_profile_that_comes_after_the_timing_is_no_setting_of_it(base: Path, tmp_path: Path) -> None:
    measure = CONFIG["measure"] | {"profile": True}
    profiled = write_samples(tmp_path / "b", config=CONFIG | {"measure": measure})
    assert len(load_runs("A", f"{base},{profiled}")) == 2


#: One configuration, twice within minutes on one H200 whose host was busy.
H200 = Path(__file__).parents[3] / "docs/results/h200"


@pytest.mark.skipif(
    not (H200 / "telemetry_again").exists(), reason="its two records are not in this checkout"
)
def test_two_real_runs_on_an_h200_are_the_same_by_replay_and_five_percent_are_slow() -> None:
    a, b = (load_side(name, H200 / folder) for name, folder in (("A", "telemetry"), ("B", "telemetry_again")))
    judged = compare([a], [b])
    assert {row.judgement.verdict for row in judged.of(Metric.REPLAY)} == {Verdict.SAME}
    assert max(row.judgement.blur for row in judged.of(Metric.REPLAY)) < 0.03
    assert not {row.judgement.verdict for row in judged.rows} & {Verdict.SLOW, Verdict.FAST}
    slowed = {
        point: replace(series, samples_ms={name: 1.05 * ms for name, ms in series.samples_ms.items()})
        for point, series in b.series.items()
    }
    planted = compare([a], [replace(b, series=slowed)]).of(Metric.REPLAY)
    assert {row.judgement.verdict for row in planted} == {Verdict.SLOW}
