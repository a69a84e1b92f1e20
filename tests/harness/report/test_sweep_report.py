"""The page of a sweep, and how its jobs are ranked."""

from __future__ import annotations

import csv
import re
import shutil
from pathlib import Path

import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.record import JobRecord
from harness.report.command import main
from harness.report.ranking import close_to_best, comparable_jobs, pareto_front
from harness.report.sweep_rows import GRAPH_MEMORY, STEP_AT_BATCH, STEP_WORKLOAD, Sweep, SweepJob, read_sweep
from tests.harness.job_folder import write_job
from tests.harness.report.pages import Markup, figure, figures, report
from tests.harness.report.sweep_folder import write_sweep
from tests.harness.report.test_job_report import EVIL, _with_colours


def job(name: str, memory: float | None, step_ms: float | None, **more: object) -> SweepJob:
    values = {GRAPH_MEMORY.key: memory, STEP_WORKLOAD.key: step_ms, STEP_AT_BATCH.key: step_ms}
    return SweepJob(name, "ok", {}, values=values, **more)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=20))
def test_the_front_holds_what_no_job_beats_in_both(points: list[tuple[int, int]]) -> None:
    jobs = [job(str(index), float(memory), float(step)) for index, (memory, step) in enumerate(points)]
    front = {
        (one.values[GRAPH_MEMORY.key], one.values[STEP_WORKLOAD.key])
        for one in pareto_front(jobs, STEP_WORKLOAD)
    }
    unbeaten = {
        (memory, step)
        for memory, step in points
        if not any((m <= memory and s <= step) and (m, s) != (memory, step) for m, s in points)
    }
    assert front == unbeaten


def test_jobs_within_the_noise_of_the_best_are_not_told_apart() -> None:
    jobs = [job("slow", 1.0, 1.2), job("best", 9.0, 1.0), job("near", 2.0, 1.015)]
    assert [one.name for one in close_to_best(jobs, STEP_WORKLOAD)] == ["best", "near"]
    jobs[0].step_error = 0.3
    assert [one.name for one in close_to_best(jobs, STEP_AT_BATCH)] == ["best", "near", "slow"]


def test_unverified_failed_and_emulated_jobs_are_not_ranked_beside_real_ones() -> None:
    real = job("0", 1.0, 1.0)
    others = [job("1", 1.0, 1.0, is_unverified=True), job("2", 1.0, 1.0, is_emulated=True)]
    failed = SweepJob("3", "failed", {}, values=real.values)
    assert comparable_jobs(Sweep(Path(), [real, *others, failed], 8)) == [real]
    assert comparable_jobs(Sweep(Path(), others, 8)) == [others[1]]


def test_jobs_are_read_with_what_was_varied_and_how_they_ended(tmp_path: Path) -> None:
    sweep = read_sweep(write_sweep(tmp_path, failed=(2,)))
    assert [one.name for one in sweep.jobs] == ["0", "1", "2", "3", "4", "5"]
    assert sweep.jobs[1].varied == {"capture": "sglang", "padding": "nearest"}
    assert sweep.jobs[5].varied == {"capture": "vllm", "padding": "split"}
    assert sweep.jobs[2].status == "capture_oom" and "300 MiB short" in sweep.jobs[2].error
    assert sweep.batch_size == 8
    assert sweep.jobs[0].values[STEP_AT_BATCH.key] == 1.5
    assert sweep.jobs[0].values[STEP_WORKLOAD.key] == 2.0
    assert sweep.jobs[0].values[GRAPH_MEMORY.key] == (4096 * 15 + 4 * 512) / 1024**2


def test_a_sweep_cut_off_before_its_first_row_is_read_from_the_configs(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    (tmp_path / "sweep.csv").unlink()
    JobRecord(tmp_path / "6").close()
    sweep = read_sweep(tmp_path)
    assert sweep.jobs[5].varied == {"padding.strategy": "split", "capture.policy": "vllm"}
    assert sweep.jobs[6].status == "running" and sweep.jobs[6].varied == {}


def test_a_resumed_job_is_read_where_it_ran(tmp_path: Path) -> None:
    write_sweep(tmp_path / "new")
    shutil.move(tmp_path / "new" / "3", tmp_path / "old")
    path = tmp_path / "new" / "sweep.csv"
    rows = list(csv.DictReader(path.open(newline="")))
    rows[3]["resumed_from"] = str(tmp_path / "old")
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    assert {one.name for one in read_sweep(tmp_path / "new").jobs} == {"0", "1", "2", "3", "4", "5"}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("result.json", "{", "result.json is damaged"),
        ("result.json", '{"schema_version": "99.0"}', "has schema version 99.0"),
        ("sizes.csv", "batch_size\nfour\n", "sizes.csv is damaged"),
        ("steps.parquet", "none", "steps.parquet is damaged"),
    ],
)
def test_a_job_that_cannot_be_read_is_a_row_that_says_so_and_the_others_are_shown(
    name: str, content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sweep(tmp_path)
    whole = read_sweep(tmp_path)
    (tmp_path / "1" / name).write_text(content)
    assert main([str(tmp_path), "--jobs"]) == 0
    warning = f"job 1 is left out: {tmp_path / '1' / name}"
    assert f"warning: {warning}" in capsys.readouterr().err
    assert warning in (page := (tmp_path / "report.html").read_text())
    assert "1 unreadable: see the table" in page
    sweep = read_sweep(tmp_path)
    assert sweep.jobs[1].status == "unreadable" and said in sweep.jobs[1].error
    assert [one.values for one in sweep.jobs if one.name != "1"] == [
        one.values for one in whole.jobs if one.name != "1"
    ]


def test_a_sweep_is_shown_with_its_front_and_all_jobs(tmp_path: Path) -> None:
    page = report(write_sweep(tmp_path, failed=(2,)))
    assert [one["name"] for one in figures(page)] == ["pareto", "parallel"]
    for one in figures(page):
        go.Figure({"data": one["traces"], "layout": _with_colours(one["layout"])}, skip_invalid=False)
    markup = Markup(page)
    assert len(re.findall(r'<tr data-job="', page)) == 6
    assert "1 capture_oom: see the table" in markup.text
    assert "300 MiB short" in markup.text
    assert "best is job" in markup.text


def test_every_job_can_be_pointed_at_in_every_chart(tmp_path: Path) -> None:
    page = report(write_sweep(tmp_path))
    num_menus = len(figure(page, "pareto")["choices"])
    assert len(figure(page, "pareto")["jobs"]) == 6 * num_menus
    places = figure(page, "parallel")["jobs"]
    assert set(places) == {"0", "1", "2", "3", "4", "5"}
    assert all(0 <= y <= 1 for _, ys in places.values() for y in ys if y is not None)


def test_table_heads_are_buttons_and_missing_values_sort_as_missing(tmp_path: Path) -> None:
    write_sweep(tmp_path, num_jobs=3)
    (tmp_path / "1" / "steps.parquet").unlink()
    page = report(tmp_path)
    table = page[
        page.index('<table class="jobs">') : page.index("</table>", page.index('<table class="jobs">'))
    ]
    assert table.count("<th") - 1 == table.count('<button type="button">')  # one of them is <thead
    assert 'data-value=""' in table


def test_an_emulated_sweep_is_marked_on_every_chart(tmp_path: Path) -> None:
    page = report(write_sweep(tmp_path, graph_backend="emulated"))
    assert all("EMULATED" in one["layout"]["annotations"][-1]["text"] for one in figures(page))
    assert "In all jobs graphs were emulated" in Markup(page).text


def test_different_traffic_is_pointed_out(tmp_path: Path) -> None:
    write_sweep(tmp_path, num_jobs=2)
    path = tmp_path / "sweep.csv"
    path.write_text(
        path.read_text()
        .replace("capture=vllm", "workload.request_rate=4")
        .replace("capture=sglang", "workload.request_rate=8")
    )
    assert "These jobs differ in workload.request_rate too" in Markup(report(tmp_path)).text


def test_overrides_and_errors_cannot_become_markup(tmp_path: Path) -> None:
    write_sweep(tmp_path, num_jobs=3, failed=(2,))
    path = tmp_path / "sweep.csv"
    path.write_text(path.read_text().replace("capture=vllm", "capture=" + EVIL.replace('"', '""')))
    with JobRecord.attach(tmp_path / "2") as record:
        record.update(error={"kind": EVIL, "message": EVIL})
    page = report(tmp_path)
    markup = Markup(page)
    assert markup.count("script") == 3 and markup.count("img") == 0
    assert "<img" not in str(figures(page))


def test_a_sweep_of_failed_jobs_has_a_table_and_no_chart(tmp_path: Path) -> None:
    page = report(write_sweep(tmp_path, num_jobs=2, failed=(0, 1)))
    assert figures(page) == []
    assert "No job has figures that may be compared" in Markup(page).text
    assert len(re.findall(r'<tr data-job="', page)) == 2


def test_a_job_of_another_kind_in_the_folder_is_one_more_row(tmp_path: Path) -> None:
    write_sweep(tmp_path, num_jobs=2)
    write_job(tmp_path / "extra")
    assert [one.name for one in read_sweep(tmp_path).jobs] == ["0", "1", "extra"]


def test_jobs_with_a_page_of_their_own_are_linked(tmp_path: Path) -> None:
    write_sweep(tmp_path / "a sweep", num_jobs=2)
    shutil.move(tmp_path / "a sweep" / "1", tmp_path / "elsewhere")
    path = tmp_path / "a sweep" / "sweep.csv"
    path.write_text(path.read_text().replace(str(tmp_path / "a sweep" / "1"), str(tmp_path / "elsewhere")))
    assert "href" not in report_table(tmp_path / "a sweep")
    report(tmp_path / "elsewhere")
    assert main([str(tmp_path / "a sweep"), "--jobs"]) == 0
    links = re.findall(r'<a href="([^"]*)"', report_table(tmp_path / "a sweep"))
    assert links == ["0/report.html", "../elsewhere/report.html"]


def report_table(folder: Path) -> str:
    page = report(folder)
    return page[page.index('<table class="jobs">') :].split("</table>")[0]
