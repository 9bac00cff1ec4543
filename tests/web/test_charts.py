"""The charts of the page and of a report, drawn and still, as a user reads and zooms them in a browser."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from sentinel.report.content import report
from sentinel.report.page import page as report_page
from sentinel.report.stored_runs import StoredRuns
from sentinel.store import History
from tests.browser import Browser, browser
from tests.daemon.simulated import SimulatedRank
from tests.report.runs import case, history
from tests.waiting import until
from tests.web.conftest import Served, keep_picture, served_here

pytestmark = [pytest.mark.processes, pytest.mark.browser, pytest.mark.usefixtures("driver")]


@pytest.fixture
def noted(served: Served) -> Iterator[Served]:
    """A run of 100 steps with four charts: one step stands out, and the last losses are not finite."""
    with SimulatedRank(served.socket) as rank:
        rank.hello()
        rank.steps(
            0,
            [2.0 + n / 100 if n < 90 else math.nan for n in range(100)],
            grad_norm=[1000.0 if n == 50 else 1.0 for n in range(100)],
            step_seconds=[0.25] * 100,
            rss_bytes=[2e9] * 100,
        )
        until(lambda: "<dd>99</dd>" in served.get("/live?run=r1", headers=served.authorized()).text, "the steps")
        yield served


def open_charts(page: Browser, served: Served, view: str = "") -> None:
    """Open the page and wait for its charts; `view` is appended to the address."""
    page.go("about:blank")  # otherwise the same address would load nothing
    page.go(f"{served.url}/#{served.state['token']}&run=r1{view}")
    page.until("document.querySelectorAll('.charts .uplot').length === 4")


def read_legends(page: Browser) -> dict[str, str]:
    """Return the texts below the charts by name, with the step that all of them share."""
    rows = (
        "[...document.querySelectorAll('.u-series')].map(row => [...row.children].map(one => one.textContent.trim()))"
    )
    cells = page.asked(rows)
    assert len({value for name, value in cells if name == "step"}) == 1
    return dict(cells)


def place_of(page: Browser, step: float, chart: int = 0) -> tuple[float, float]:
    """Return the coordinates of a step on a chart that shows steps 0 to 99."""
    left, top, width = page.asked(f"""(() => {{
        const box = document.querySelectorAll('.u-over')[{chart}].getBoundingClientRect();
        return [box.left, box.top + box.height / 2, box.width];
    }})()""")
    return left + width * step / 99, top


@pytest.mark.slow
@pytest.mark.charts
def test_the_values_of_one_step_are_read_on_all_charts(noted: Served, chromium: str, tmp_path: Path) -> None:
    with browser(chromium, tmp_path / "profile") as page:
        open_charts(page, noted)
        assert read_legends(page)["step"] == "99"  # the newest step while the mouse points at none

        def read(step: int, beside: float = 0.0, chart: int = 0) -> dict[str, str]:
            page.point(*place_of(page, step + beside, chart))
            page.until(f"document.querySelector('.u-series .u-value').textContent === '{step}'")
            return read_legends(page)

        for chart in range(4):
            assert read(20, chart=chart) == {
                "step": "20", "loss": "2.2", "grad_norm": "1", "step_seconds": "250 ms", "rss_bytes": "2 GB",
            }  # fmt: skip
        for beside in (0.0, 0.3):  # a mouse is at whole pixels
            assert read(50, beside)["grad_norm"] == "1000"
        assert read(95)["loss"] == "not finite"
        page.asked("refresh()")
        assert read_legends(page)["loss"] == "not finite"
        page.point(5, 5)
        page.until("document.querySelector('.u-series .u-value').textContent === '99'")
        assert page.complaints == []


@pytest.mark.slow
@pytest.mark.charts
def test_what_is_zoomed_into_is_in_the_address(noted: Served, chromium: str, tmp_path: Path) -> None:
    with browser(chromium, tmp_path / "profile") as page:
        open_charts(page, noted)
        page.drag(place_of(page, 20), place_of(page, 60))
        address = page.until("location.hash.includes('steps=') && location.hash")
        first, last = map(int, re.findall(r"steps=(\d+)\.\.(\d+)", address)[0])
        assert (first, last) == (pytest.approx(20, abs=1), pytest.approx(60, abs=1))
        assert address.startswith(f"#{noted.state['token']}&")
        assert read_legends(page)["step"] == str(last)
        page.click("[data-scale=loss]")
        page.choose("#smooth", "10")
        address = page.asked("location.hash")
        assert parse_qs(address.partition("&")[2]) == {
            "run": ["r1"],
            "steps": [f"{first}..{last}"],
            "log": ["loss"],
            "smooth": ["10"],
        }
        keep_picture(page, "page-zoomed")
        open_charts(page, noted, address.partition("&run=r1")[2])
        assert page.asked("location.hash") == address
        assert read_legends(page)["step"] == str(last)
        assert page.asked("document.getElementById('smooth').value") == "10"
        assert page.asked("document.querySelector('[data-scale=loss]').textContent") == "log"
        page.asked("refresh()")
        assert read_legends(page)["step"] == str(last)  # a live page keeps its zoom
        page.drag(place_of(page, 50), place_of(page, 70), shift=True)
        assert page.until("location.hash.match(/steps=(-?\\d+)/)[1]") != str(first)
        page.click("[data-way=all]")
        assert "steps" not in page.asked("location.hash")
        page.point(5, 5)
        page.until("document.querySelector('.u-series .u-value').textContent === '99'")
        page.asked(f"location.hash = '#{noted.state['token']}&run=r1&steps=10..30'")  # as a person types it
        page.until("document.querySelector('.u-series .u-value')?.textContent === '30'")
        assert page.complaints == []


@pytest.mark.slow
@pytest.mark.charts
def test_a_signal_that_is_not_finite_at_any_step_is_drawn_as_crosses(
    served: Served, chromium: str, tmp_path: Path
) -> None:
    """As of a run that went on after a NaN until the daemon's memory held no other step."""
    with SimulatedRank(served.socket) as rank, browser(chromium, tmp_path / "profile") as page:
        rank.hello()
        rank.steps(0, [math.nan] * 10, grad_norm=[math.inf] * 10, step_seconds=[0.2] * 10)
        page.go(f"{served.url}/#{served.state['token']}&run=r1")
        page.until("document.querySelectorAll('.charts .uplot').length === 3")
        legends = read_legends(page)
        assert (legends["loss"], legends["grad_norm"]) == ("not finite", "not finite")
        crosses = page.asked("""new Promise(done => {
            const context = CanvasRenderingContext2D.prototype, {moveTo} = context;
            let strokes = 0;
            context.moveTo = function (x, y) {
                strokes += y < 30;
                moveTo.call(this, x, y);
            };
            dispatchEvent(new Event('hashchange'));  // all charts are made again
            requestAnimationFrame(() => requestAnimationFrame(() => done(strokes)));
        })""")
        assert crosses >= 2 * 2 * 10
        page.asked("refresh()")
        assert page.complaints == []


DRAWN = """new Promise(done => {
    const found = {}, context = CanvasRenderingContext2D.prototype, {fillText, moveTo, lineTo} = context;
    const of = one => found[one.canvas.closest('figure').querySelector('figcaption').firstChild.textContent] ??=
        {numbers: new Set(), lines: new Set()};
    let from = [0, 0];
    context.fillText = function (text, ...place) {
        if (this.textAlign === 'right' && text) of(this).numbers.add(text);
        fillText.call(this, text, ...place);
    };
    context.moveTo = function (...place) {
        from = place;
        moveTo.apply(this, place);
    };
    context.lineTo = function (x, y) {
        if (y === from[1] && x - from[0] > 100) of(this).lines.add(y);
        lineTo.call(this, x, y);
    };
    dispatchEvent(new Event('hashchange'));  // all charts are made again
    const count = ({numbers, lines}) => [[...numbers], lines.size];
    requestAnimationFrame(() => requestAnimationFrame(
        () => done(Object.fromEntries(Object.entries(found).map(([name, drawn]) => [name, count(drawn)])))));
})"""
"""A script that returns, for each chart, the numbers at its vertical axis and how many lines cross it."""


@pytest.mark.slow
@pytest.mark.charts
def test_an_axis_has_few_lines_and_a_number_at_each(served: Served, chromium: str, tmp_path: Path) -> None:
    with SimulatedRank(served.socket) as rank, browser(chromium, tmp_path / "profile") as page:
        rank.hello()
        rank.steps(
            0,
            [2.291 + n / 1e5 for n in range(100)],
            grad_norm=[1e26 if n == 50 else 1.0 for n in range(100)],
            step_seconds=[6.933e-4] * 100,
            rss_bytes=[2e9 + 1e8 * n for n in range(100)],
        )
        until(lambda: "<dd>99</dd>" in served.get("/live?run=r1", headers=served.authorized()).text, "the steps")
        open_charts(page, served, "&log=loss&log=memory")
        assert read_legends(page)["step_seconds"] == "0.6933 ms"
        drawn = page.asked(DRAWN)
        counts = {name: (len(numbers), lines) for name, (numbers, lines) in drawn.items()}
        assert {name for name, (numbers, lines) in counts.items() if 3 <= numbers == lines <= 8} == set(counts), drawn
        assert all(2.29 < float(number) < 2.3 for number in drawn["loss"][0])
        assert {"1", "1e+25"} <= set(drawn["gradient norm"][0])
        assert "10 GB" in drawn["memory"][0]
        assert page.complaints == []


@pytest.mark.slow
@pytest.mark.charts
def test_a_long_run_shows_every_sample_of_what_is_zoomed_into(
    private_places: Path, chromium: str, tmp_path: Path
) -> None:
    runs = private_places / "state" / "runs"
    runs.mkdir(parents=True)
    history(runs / "long.sqlite", steps=20_000)
    value = """[...document.querySelectorAll('.u-series')]
        .find(row => row.textContent.includes('step_seconds')).children[1].textContent"""
    with served_here(StoredRuns()) as address, browser(chromium, tmp_path / "profile") as page:
        page.go(f"{address}/#token&run=long&view=whole")
        page.until("document.querySelectorAll('.charts .uplot').length === 3")
        page.asked("address.set('steps', '7000..7100')")
        page.until("main.dataset.path.endsWith('&steps=7000..7100')")
        left, top, width = page.asked("""(() => {
            const box = document.querySelector('.u-over').getBoundingClientRect();
            return [box.left, box.top + box.height / 2, box.width];
        })()""")
        seen = set()
        for step in range(7040, 7050):
            page.point(left + width * (step - 7000) / 100, top)
            page.until(f"document.querySelector('.u-series .u-value').textContent === '{step:,}'")
            seen.add(page.asked(value))
        assert len(seen) >= 9
        assert page.complaints == []


@pytest.mark.slow
@pytest.mark.charts
def test_a_mark_opens_its_incident_and_the_address_keeps_the_zoom(
    served: Served, chromium: str, tmp_path: Path
) -> None:
    with SimulatedRank(served.socket) as rank, browser(chromium, tmp_path / "profile") as page:
        rank.hello()
        rank.steps(0, [3.0, 2.0, 2.0, 2.0, math.nan])
        page.go(f"{served.url}/#{served.state['token']}&run=r1&steps=1..4")
        page.until("document.querySelector('.u-over a.mark')")
        page.click(".u-over a.mark b")
        assert page.asked("document.activeElement.id") == "case-1"
        assert page.asked("location.hash").endswith("&steps=1..4")
        assert page.complaints == []


@pytest.mark.slow
@pytest.mark.charts
def test_a_report_keeps_what_is_zoomed_into(chromium: str, tmp_path: Path) -> None:
    with History(history(tmp_path / "gpt.sqlite", steps=100, cases=(case(1, 40),))) as kept_run:
        (tmp_path / "r.html").write_text(report_page([report(kept_run)], "0"))
    with browser(chromium, tmp_path / "profile") as page:
        page.go((tmp_path / "r.html").as_uri())
        page.asked("document.querySelector('.charts').scrollIntoView()")
        page.drag(place_of(page, 20), place_of(page, 60))
        address = page.until("location.hash.includes('steps=') && location.href")
        page.click("a.mark b")
        assert page.asked("document.activeElement.id") == "case-1"
        assert page.asked("location.href") == address
        page.go("about:blank")
        page.go(address)
        assert f"..{read_legends(page)['step']}" in address
        page.size(390, 844)
        page.until("document.querySelector('.uplot canvas').getBoundingClientRect().width < 390")
        assert page.asked("document.documentElement.scrollWidth") <= 390
        assert page.complaints == []


@pytest.mark.usefixtures("still_charts")
def test_still_charts_of_a_report_lead_to_its_incidents(chromium: str, tmp_path: Path) -> None:
    with History(history(tmp_path / "gpt.sqlite", cases=(case(1, 123),))) as kept_run:
        (tmp_path / "r.html").write_text(report_page([report(kept_run)], "0"))
    with browser(chromium, tmp_path / "profile") as page:
        page.go((tmp_path / "r.html").as_uri())
        page.click("a.mark text")
        assert page.asked("document.querySelector('.case:target h3').textContent").startswith("1 LossSpike")
        assert page.complaints == []


@pytest.mark.slow
@pytest.mark.usefixtures("still_charts")
def test_still_charts_of_the_page_lead_to_its_incidents(chromium: str, tmp_path: Path) -> None:
    stored = StoredRuns(history(tmp_path / "gpt.sqlite", cases=(case(1, 123),)))
    with served_here(stored) as address, browser(chromium, tmp_path / "profile") as page:
        page.go(f"{address}/#token&run=gpt")
        page.until("document.querySelector('a.mark')")
        page.click("a.mark text")
        assert page.asked("document.activeElement.id") == "case-1"
        assert "python -m sentinel.web.fetch_charts" in page.asked("document.querySelector('main').innerText")
        assert page.asked("document.getElementById('tools').hidden")
        page.click("#views [data-view=whole]")
        page.until("document.querySelector('.summary') && document.querySelector('path.curve')")
        assert page.complaints == []
