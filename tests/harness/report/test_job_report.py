"""The page of one job, read back from its HTML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from harness.errors import ConfigError
from harness.record import JobRecord, Status
from harness.report.command import main
from harness.report.step_charts import graph_steps
from tests.harness.job_folder import CAPTURE_SIZES, CONFIG, NUM_STEPS, sizes_row, write_job
from tests.harness.report.pages import Markup, figure, figures, report, trace
from tests.harness.report.samples import write_samples

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&"
NAMES = ["step-time", "step-parts", "profile", "capture", "timeline", "padding", "latency"]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("job")
    write_job(folder)
    return report(folder)


def test_a_job_is_shown_in_seven_figures(page: str) -> None:
    assert [one["name"] for one in figures(page)] == NAMES


def test_plotly_knows_every_word_of_the_figures(page: str) -> None:
    for one in figures(page):
        go.Figure({"data": one["traces"], "layout": _with_colours(one["layout"])}, skip_invalid=False)


def _with_colours(value: Any) -> Any:
    """Colours are looked up in the style sheet; here any will do."""
    if isinstance(value, dict):
        return {key: _with_colours(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_colours(item) for item in value]
    return "#123456" if isinstance(value, str) and value.startswith("var(") else value


def test_nothing_is_fetched(page: str) -> None:
    markup = Markup(page)
    assert all(address.startswith(("#", "data:")) for address in markup.addresses)
    (policy,) = (
        tag["content"] for name, tag in markup.tags if tag.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None and policy.startswith("default-src 'none'")
    assert "unsafe-inline" not in policy.split("style-src")[0]
    assert "unsafe-eval" not in policy


def test_every_figure_has_a_title_a_caption_an_alternative_text_and_its_values_as_a_table(page: str) -> None:
    markup = Markup(page)
    assert markup.count("figure") == markup.count("figcaption") == len(NAMES)
    alternatives = [tag["aria-label"] for _, tag in markup.tags if tag.get("role") == "img"]
    assert len(alternatives) == len(NAMES) and all(len(text or "") > 30 for text in alternatives)
    assert markup.count("details") >= len(NAMES)


def test_emulated_figures_are_marked_on_every_chart(page: str) -> None:
    for one in figures(page):
        assert any("EMULATED" in mark["text"] for mark in one["layout"]["annotations"]), one["name"]
    assert Markup(page).text.count("emulated") >= len(NAMES)


def test_a_cuda_job_bears_no_such_mark(tmp_path: Path) -> None:
    write_job(tmp_path, graph_backend="cuda")
    page = report(tmp_path)
    assert "emulated" not in Markup(page).text.lower()
    assert all(not one["layout"]["annotations"] for one in figures(page))


def test_an_unverified_job_has_a_banner_and_a_mark_on_every_chart(tmp_path: Path) -> None:
    write_job(tmp_path, verified=False, graph_backend="cuda")
    page = report(tmp_path)
    assert "Replay was not proven equal to eager" in Markup(page).text
    assert all("UNVERIFIED" in one["layout"]["annotations"][-1]["text"] for one in figures(page))


def test_step_time_shows_graphs_with_eager_and_roofline_beside_them(tmp_path: Path) -> None:
    page = report(write_samples(tmp_path))
    graph, eager, floor = (trace(page, "step-time", name) for name in ("graph", "eager", "roofline"))
    assert graph["x"] == eager["x"] == floor["x"] == [1, 2, 4, 8]
    assert graph["y"] == pytest.approx([1.1, 1.2, 1.4, 1.8], rel=0.02)
    assert all(0 < bar < 0.02 for bar in graph["error_y"]["array"])


def test_graphs_are_steps_and_sizes_that_were_not_measured_a_slope() -> None:
    batch_sizes, step_ms = [1, 2, 3, 8], [1.0, 1.1, 1.4, 1.8]
    assert graph_steps(batch_sizes, step_ms, [1, 2, 4, 8]) == (
        [1, 1, 2, 2, 3, 8],
        [1.0, 1.1, 1.1, 1.4, 1.4, 1.8],
    )


def test_capture_sizes_stand_on_the_batch_axis(page: str) -> None:
    assert tuple(mark["x0"] for mark in figure(page, "step-time")["layout"]["shapes"]) == CAPTURE_SIZES


def test_noisy_points_are_open(tmp_path: Path) -> None:
    write_job(tmp_path, finish=False)
    part = tmp_path / "parts" / "sizes.jsonl"
    part.write_text(
        part.read_text().replace('"unmet_condition":null', '"unmet_condition":"rel_std 0.2 > 0.05"')
    )
    assert trace(report(tmp_path), "step-time", "graph")["marker"]["symbol"] == ["circle-open"] * 3


def test_the_parts_of_a_step_add_up_to_it(page: str) -> None:
    parts = figure(page, "step-parts")["traces"][:4]
    assert [part["name"] for part in parts] == ["host prepare", "floor", "device above the floor", "rest"]
    assert sum(part["y"][0] for part in parts) == pytest.approx(1.5)


def test_steps_in_flight_show_what_the_device_waited_for_and_their_interval(tmp_path: Path) -> None:
    """Host prepare that is hidden behind the step before is no part of the pace."""
    with JobRecord(tmp_path) as record:
        point = {"batch_size": 8, "mode": "graph", "context_len": 128, "padded_batch_size": 8}
        times = {"overlap": True, "host_prepare_us_p50": 900.0, "host_exposed_us_p50": 20.0}
        record.append("sizes", sizes_row(8, "graph", "cuda") | times)
        samples = [
            point | {"timing": "overlapped", "sample": i, "step_ms": 1.5 + 0.01 * (i % 3)} for i in range(20)
        ]
        record.append_many("samples", samples)
    page = report(tmp_path)
    parts = figure(page, "step-parts")["traces"][:4]
    assert parts[0]["y"] == [0.02]
    assert sum(part["y"][0] for part in parts) == pytest.approx(1.5)
    assert trace(page, "step-time", "graph")["error_y"]["array"][0] > 0
    assert "the pace, from the tokens of the step before" in Markup(page).text


def test_the_kernels_of_each_size_are_shown_the_largest_graph_first(page: str) -> None:
    profile = figure(page, "profile")
    assert [choice["label"] for choice in profile["choices"]] == ["batch 8, graph", "batch 1, graph"]
    assert profile["traces"][0]["x"] == [600.0, 200.0]
    assert profile["traces"][0]["y"] == ["1. gemm&lt;bf16, 8&gt;(int)", "2. attention&lt;bf16, 8&gt;(int)"]
    assert "110 µs of gaps" in Markup(page).text


def test_a_latency_stands_beside_its_share_of_the_floor(tmp_path: Path) -> None:
    with JobRecord(tmp_path) as record:
        record.append("sizes", sizes_row(8, "graph", "cuda") | {"roofline_ms": 0.5, "back_to_back_ms": 1.0})
    text = Markup(report(tmp_path)).text
    assert text.count("floor % of") == 3
    assert (
        "33.33" in text and "40.00" in text and "50.00" in text
    )  # of p50 1.5, replay 1.25, back to back 1.0


def test_padding_waste_is_that_of_the_steps(page: str) -> None:
    waste = trace(page, "padding", "padding")
    assert waste["x"] == [3, 12]
    assert waste["y"] == [25.0, None]  # batch 3 pads to 4; batch 12 ran eager
    assert "25.0% of all rows that graphs replayed were padding" in Markup(page).text
    shares = sum(sum(one["y"]) for one in figure(page, "padding")["traces"][:-1])
    assert shares == pytest.approx(100.0, abs=0.1)


def test_a_hundred_thousand_steps_stay_small(tmp_path: Path) -> None:
    write_job(tmp_path / "few")
    write_job(tmp_path / "many", num_steps=100_000)
    few, many = (len(json.dumps(figures(report(tmp_path / name)))) for name in ("few", "many"))
    assert many < few + 100_000


def test_the_longest_wait_and_the_shortest_bound_the_curves(page: str) -> None:
    ttft = trace(page, "latency", "TTFT")
    assert ttft["x"][0] == ttft["x"][-1] == 12.5
    assert ttft["y"][-1] == 100.0


def test_values_from_configs_and_records_cannot_become_markup(tmp_path: Path) -> None:
    config = CONFIG | {"model": CONFIG["model"] | {"name": EVIL}, "capture": {"policy": EVIL, "sizes": []}}
    with write_job(tmp_path, config=config) as record:
        record.update(model={"name": EVIL}, warnings=[EVIL], error={"kind": EVIL, "message": EVIL})
        record.update(status=Status.FAILED, environment={"device_name": EVIL})
    page = report(tmp_path)
    markup = Markup(page)
    assert markup.count("script") == 3
    assert markup.count("img") == 0
    assert EVIL in markup.text


def test_what_a_killed_job_left_is_shown(tmp_path: Path) -> None:
    write_job(tmp_path, finish=False)
    page = report(tmp_path)
    assert [one["name"] for one in figures(page)] == NAMES
    assert "This job has not ended" in Markup(page).text
    assert sum(trace(page, "padding", "graph")["y"]) > 0 and NUM_STEPS


def test_a_failed_job_says_why_and_has_no_empty_chart(tmp_path: Path) -> None:
    with JobRecord(tmp_path) as record:
        record.update(
            status=Status.INVALID_CONFIG, error={"kind": "ConfigError", "message": "seed=x: give a number"}
        )
    page = report(tmp_path)
    assert figures(page) == []
    assert "seed=x: give a number" in Markup(page).text


def test_the_page_goes_where_it_is_told(tmp_path: Path, capsys: Any) -> None:
    write_job(tmp_path / "job")
    assert main([str(tmp_path / "job"), "--output", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").exists() and not (tmp_path / "job" / "report.html").exists()
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")


def test_a_folder_without_jobs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give the folder of a job or a sweep"):
        main([str(tmp_path)])


def test_a_record_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    write_job(tmp_path)
    result = json.loads((tmp_path / "result.json").read_text()) | {"schema_version": "9.0"}
    (tmp_path / "result.json").write_text(json.dumps(result))
    with pytest.raises(ConfigError, match="upgrade it"):
        main([str(tmp_path)])
