"""The page in a headless Chromium: no error, no request, readable in light and dark, reachable by key."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from harness.record import Status
from tests.harness.job_folder import CONFIG, write_job
from tests.harness.report.browser import CHROMIUM, Browser
from tests.harness.report.pages import report
from tests.harness.report.samples import write_samples
from tests.harness.report.sweep_folder import write_sweep
from tests.harness.report.test_job_report import EVIL, NAMES

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt install chromium")

_TAB, _ENTER = ("Tab", 9), ("Enter", 13)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    config = CONFIG | {"model": CONFIG["model"] | {"name": EVIL}, "capture": {"policy": EVIL, "sizes": []}}
    with write_job(folder, config=config) as record:
        record.update(model={"name": EVIL}, warnings=[EVIL], status=Status.OK)
    report(folder)
    return folder / "report.html"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_sweep(tmp_path_factory.mktemp("sweep"), failed=(2,))
    report(folder)
    return folder / "report.html"


def opened(browser: Browser, page: Path) -> Browser:
    browser.problems.clear()
    browser.requests.clear()
    browser.open(page)
    return browser


def test_every_chart_is_drawn_without_an_error_or_a_request(browser: Browser, job: Path, sweep: Path) -> None:
    for page, num_figures in ((job, len(NAMES)), (sweep, 2)):
        opened(browser, page)
        assert browser.evaluate("document.querySelectorAll('figure .main-svg').length") >= num_figures
        assert browser.evaluate("document.documentElement.dataset.drawn") == "true"
        assert browser.problems == []
        assert browser.requests == [page.resolve().as_uri()]


def test_markup_in_values_is_text(browser: Browser, job: Path) -> None:
    opened(browser, job)
    assert browser.evaluate("document.title").startswith("</script><script>")
    assert browser.evaluate("document.querySelectorAll('img[src=x]').length") == 0


def luminance(colour: str) -> float:
    """Relative luminance of a CSS `rgb(r, g, b)` (WCAG 2)."""
    channels = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


_COLOURS = """
[['body', 'body'], ['figcaption', 'figure'], ['summary', 'figure'], ['.subtitle', 'body'], ['.badge', '.badge'],
 ['.banner', '.banner'], ['.facts dt', '.facts div'], ['figure .xtick text', 'figure'], ['figure .legendtext', 'figure']]
.map(([text, ground]) => {
  const style = getComputedStyle(document.querySelector(text));
  const isSvg = document.querySelector(text) instanceof SVGElement;
  return [text, isSvg ? style.fill : style.color, getComputedStyle(document.querySelector(ground)).backgroundColor];
})
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_light_and_dark(browser: Browser, job: Path, tmp_path: Path, scheme: str) -> None:
    opened(browser, job)
    browser.set_scheme(scheme)
    for name, text, ground in browser.evaluate(_COLOURS):
        assert contrast(text, ground) >= 4.5, (name, text, ground)
    browser.screenshot(tmp_path / "page.png")
    pixels = Image.open(io.BytesIO((tmp_path / "page.png").read_bytes())).convert("L")
    corner = pixels.getpixel((2, 2))
    assert isinstance(corner, int) and (corner > 200) == (scheme == "light")
    assert pixels.height > 3000
    assert browser.problems == []


def focused(browser: Browser) -> Any:
    return browser.evaluate(
        "(e => e.id || e.className || e.textContent || e.tagName)(document.activeElement)"
    )


def test_everything_can_be_reached_by_the_tab_key(browser: Browser, job: Path) -> None:
    opened(browser, job)
    reached = []
    for _ in range(60):
        browser.press(*_TAB)
        reached.append(focused(browser))
        if reached[-1] == "BODY" or (reached[-1] == reached[0] and len(reached) > 1):
            break
    assert reached[0] == "skip"
    assert {"step-time-log", "step-parts-menu", "latency-log"} <= set(reached)
    assert reached.count("The same as a table") == len(NAMES)


def test_jobs_are_sorted_filtered_and_shown_by_key(browser: Browser, sweep: Path) -> None:
    opened(browser, sweep)
    first = "document.querySelector('table.jobs tbody tr').dataset.job"
    browser.evaluate("document.querySelectorAll('table.jobs th button')[0].focus()")
    assert browser.evaluate(first) == "0"
    for expected in ("0", "5"):
        browser.press(*_ENTER, text="\r")
        assert browser.evaluate(first) == expected
    browser.evaluate("document.getElementById('filter').focus()")
    browser.call("Input.insertText", text="sglang")
    shown = "[...document.querySelectorAll('table.jobs tbody tr')].filter(row => !row.hidden).map(row => row.dataset.job)"
    assert browser.evaluate(shown) == ["1"]
    chosen = "document.getElementById('parallel').data.at(-1).x.length"
    assert browser.evaluate(chosen) > 0
    assert browser.problems == []


def test_a_menu_and_a_checkbox_change_the_chart(browser: Browser, tmp_path: Path) -> None:
    report(write_samples(tmp_path))
    opened(browser, tmp_path / "report.html")
    shown = "document.getElementById('step-parts').data.map(trace => trace.visible)"
    assert browser.evaluate(shown) == [True] * 4 + [False] * 4
    browser.evaluate(
        "(menu => { menu.selectedIndex = 1; menu.dispatchEvent(new Event('change')) })"
        "(document.getElementById('step-parts-menu'))"
    )
    assert browser.evaluate(shown) == [False] * 4 + [True] * 4
    kind = "document.getElementById('step-time').layout.xaxis.type"
    assert browser.evaluate(kind) == "linear"
    browser.evaluate("document.getElementById('step-time-log').click()")
    assert browser.evaluate(kind) == "log"
