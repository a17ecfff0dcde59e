"""The page in a real browser: every chart is drawn without an error or a request, at any width, in light and dark."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from planning_cases import random_case
from report_cases import EVIL, evil_job, job_of, measured_like, stored_run
from test_cli_check import checked, observed
from test_tradeoff import drawn

from qsync_planner.indicator_check import compare, read_truth
from qsync_planner.indicator_check.page import render_page as render_check
from qsync_planner.reporting import write_report
from qsync_planner.reporting.page import render
from qsync_planner.reporting.report import report_page
from qsync_planner.reporting.tradeoff_page import render_page
from qsync_planner.reporting.ways_to_run import predicted_timeline

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.nightly, pytest.mark.skipif(PROGRAM is None, reason="there is no chromium on this machine")]

CONTRAST = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const found = parse(getComputedStyle(e).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
  };
  const low = [];
  for (const element of document.querySelectorAll("body *")) {
    const says = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!says || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(element.tagName)) continue;
    const style = getComputedStyle(element);
    const ink = light(parse(element instanceof SVGElement ? style.fill : style.color)), paper = light(behind(element));
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    if (!(ratio >= 4.5)) low.push([element.tagName, element.textContent.slice(0, 40), ratio]);
  }
  return low;
}"""
COUNTS = """() => [...document.querySelectorAll("figure.chart")].map((figure) => ({
  drawn: figure.dataset.drawn,
  marks: [...figure.querySelectorAll("g.mark-rect, g.mark-symbol, g.mark-rule")].filter((g) => g.getAttribute("role") ||
    g.classList.contains("marks")).reduce((sum, g) => sum + g.querySelectorAll("path, line").length, 0),
  expected: JSON.parse(figure.querySelector("script").textContent).layer
    .filter((layer) => ["rect", "point", "rule"].includes(layer.mark.type))
    .reduce((sum, layer) => sum + layer.data.values.length, 0),
}))"""


@attrs.define
class Opened:
    """A page in the browser, what it wrote to the console, and what it asked the network for."""

    page: Any
    errors: list[str] = attrs.field(factory=list)
    requests: list[str] = attrs.field(factory=list)

    def wait(self) -> None:
        """Until every chart is drawn, or has failed."""
        self.page.wait_for_function("[...document.querySelectorAll('figure.chart')].every((f) => f.dataset.drawn)")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        quiet = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]
        browser = driver.chromium.launch(executable_path=PROGRAM, args=[*quiet, "--disable-component-update", "--no-first-run"])
        yield browser
        browser.close()


def opened(chromium: Any, path: Path, width: int = 1200, scheme: str = "light") -> Opened:
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.set_default_timeout(120_000)  # a busy machine draws slowly
    found = Opened(context.new_page())
    found.page.on("console", lambda message: found.errors.append(message.text) if message.type in ("error", "warning") else None)
    found.page.on("pageerror", lambda error: found.errors.append(str(error)))
    found.page.on("request", lambda request: found.requests.append(request.url))
    found.page.goto(path.as_uri())
    found.wait()
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of ResNet50's 54 operators."""
    return write_report(stored_run(tmp_path_factory.mktemp("run") / "run"))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """201 operators in three groups."""
    job = job_of(random_case(5, blocks=100, infer_groups=2))
    predicted = predicted_timeline(job)
    assert predicted is not None
    path = tmp_path_factory.mktemp("many") / "report.html"
    path.write_text(render(report_page(job, predicted, measured_like(predicted))), encoding="utf-8")
    return path


@pytest.mark.parametrize("which", ["written", "many"])
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (400, "dark"), (400, "light"), (1200, "dark")])
def test_every_chart_is_drawn(chromium: Any, which: str, width: int, scheme: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(which)
    found = opened(chromium, path, width, scheme)
    counts = found.page.evaluate(COUNTS)
    assert len(counts) >= 5
    for figure in counts:
        assert figure["drawn"] == "yes"
        assert figure["marks"] >= figure["expected"] > 0
    assert found.errors == []
    assert found.requests == [path.as_uri()]
    scroll, client = found.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert scroll <= client
    assert found.page.evaluate(CONTRAST) == []
    found.page.context.close()


def test_what_is_drawn_stays_inside_its_figure(chromium: Any, written: Path) -> None:
    found = opened(chromium, written, 400)
    outside = found.page.evaluate(
        """() => [...document.querySelectorAll("figure.chart svg text, figure.chart svg path")].filter((e) => {
          const box = e.getBoundingClientRect();
          return box.width && (box.left < -1 || box.right > innerWidth + 1);
        }).map((e) => e.outerHTML.slice(0, 200))"""
    )
    assert outside == []
    found.page.context.close()


def test_a_cell_says_its_operator_and_reason(chromium: Any, written: Path) -> None:
    found = opened(chromium, written)
    figure = found.page.locator("figure.chart").nth(1)
    figure.locator("g.mark-rect path").first.hover()
    tooltip = found.page.locator("#vg-tooltip-element.visible").inner_text()
    assert "conv1#0" in tooltip
    assert "a training group keeps its base precision" in tooltip
    found.page.context.close()


def test_a_dot_of_the_trade_off_leads_to_its_row(chromium: Any, tmp_path: Path) -> None:
    path = tmp_path / "curve.html"
    path.write_text(render_page(drawn()), encoding="utf-8")
    found = opened(chromium, path)
    dots = found.page.locator("g.mark-symbol path")
    assert dots.count() == 3
    places = [dots.nth(i).bounding_box() for i in range(3)]
    assert [place["x"] for place in places] == sorted(place["x"] for place in places)
    assert [place["y"] for place in places] == sorted(place["y"] for place in places)
    dots.nth(1).click()
    found.page.wait_for_function("location.hash === '#plan-2'")
    assert found.page.locator("tr:target").inner_text().startswith("2\t20.00 ms")
    assert found.errors == []
    assert set(found.requests) <= {path.as_uri(), f"{path.as_uri()}#plan-2"}
    found.page.context.close()


def test_the_page_of_an_indicator_check_is_drawn(chromium: Any, tmp_path: Path) -> None:
    dag, rows, omega = checked()
    found = compare({"good": omega, "other": omega}, read_truth(observed(dag, rows), dag))
    path = tmp_path / "check.html"
    path.write_text(render_check(found), encoding="utf-8")
    shown = opened(chromium, path, 400)
    assert [figure["drawn"] for figure in shown.page.evaluate(COUNTS)] == ["yes", "yes"]
    assert shown.page.locator("figure.chart").nth(0).locator("g.mark-symbol path").count() == 6
    assert shown.page.locator("figure.chart").nth(0).locator("g.mark-line path").count() == 3
    assert shown.errors == []
    shown.page.context.close()


def test_names_are_text_and_run_nothing(chromium: Any, tmp_path: Path) -> None:
    job = evil_job()
    predicted = predicted_timeline(job)
    assert predicted is not None
    text = render(report_page(job, predicted, measured_like(predicted), title=EVIL))
    path = tmp_path / "evil.html"
    path.write_text(text, encoding="utf-8")
    found = opened(chromium, path)
    assert found.page.title() == EVIL
    assert found.page.locator("h1").inner_text() == EVIL
    assert found.page.locator("img").count() == 0
    figures = found.page.locator("figure.chart").count()
    assert found.page.locator("script").count() == figures + 1
    for figure, mark in ((1, "g.mark-rect path"), (2, "g.mark-symbol path"), (figures - 1, "g.mark-rect path")):
        found.page.locator("figure.chart").nth(figure).locator(mark).first.hover()
        assert EVIL[:40] in found.page.locator("#vg-tooltip-element.visible").inner_text()
    assert found.page.evaluate("window.hacked") is None
    assert found.errors == []
    assert found.requests == [path.as_uri()]
    found.page.context.close()


def test_without_scripts_the_tables_and_the_verdict_are_there(chromium: Any, written: Path) -> None:
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(written.as_uri())
    assert "use infer:" in page.locator(".verdict").inner_text().lower()
    assert page.locator("table").count() >= 4
    assert page.locator("noscript").inner_text().startswith("The charts are drawn by this page's own script")
    context.close()
