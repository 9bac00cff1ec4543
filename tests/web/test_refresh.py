"""How an open page in a browser follows its daemon, and says so if it does not."""

from __future__ import annotations

import json
import math
import re
import signal
from pathlib import Path

import pytest

from sentinel.report.stored_runs import StoredRuns
from sentinel.web import fetch_charts
from tests.browser import browser
from tests.daemon.simulated import SimulatedRank
from tests.report.runs import case, history
from tests.waiting import until
from tests.web.conftest import Served, served_here

pytestmark = [pytest.mark.processes, pytest.mark.browser]

IMPATIENT = """(() => {
    window.patience = AbortSignal.timeout;
    AbortSignal.timeout = () => patience.call(AbortSignal, 500);
})()"""
"""A script that makes the page wait for answers for half a second only."""


@pytest.mark.slow
def test_a_daemon_that_stands_still_is_not_shown_as_live(served: Served, chromium: str, tmp_path: Path) -> None:
    with SimulatedRank(served.socket) as rank, browser(chromium, tmp_path / "profile") as page:
        rank.hello()
        rank.steps(0, [3.0, 2.0])
        page.go(f"{served.url}/#{served.state['token']}&run=r1")
        page.until("document.querySelector('.state.running')")
        page.asked(IMPATIENT)
        served.process.send_signal(signal.SIGSTOP)
        said = page.until("document.body.classList.contains('stale') && document.getElementById('note').textContent")
        assert re.match(r"The daemon does not answer since \d+:\d\d:\d\d\s?\w*: it stands still, or reads", said)
        page.asked("AbortSignal.timeout = patience")
        served.process.send_signal(signal.SIGCONT)
        page.asked("refresh()")
        page.until("!document.body.classList.contains('stale')")
        assert page.asked("document.getElementById('note').textContent") == "Live."


@pytest.mark.slow
def test_what_another_daemon_does_not_show_is_marked_as_old(tmp_path: Path, chromium: str) -> None:
    """A daemon that was restarted at the same port has another token."""
    stored = StoredRuns(history(tmp_path / "gpt.sqlite"))
    with browser(chromium, tmp_path / "profile") as page:
        with served_here(stored) as address:
            page.go(f"{address}/#token&run=gpt")
            page.until("document.querySelector('[data-state=ended]')")
        with served_here(stored, port=int(address.rpartition(":")[2]), token="another"):
            page.asked("refresh()")
            said = page.asked("document.getElementById('note').textContent")
            assert "Another daemon answers at this address: `sentinel page gpt` prints the whole one." in said
            assert re.search(r"Nothing new since \d+:\d\d:\d\d", said)
            assert page.asked("document.body.classList.contains('stale')")
            assert page.asked("document.querySelector('h1').textContent").startswith("gpt not known")


@pytest.mark.slow
def test_a_hidden_page_counts_the_incidents_in_its_title_and_is_requested_seldom(
    served: Served, chromium: str, tmp_path: Path
) -> None:
    with SimulatedRank(served.socket) as rank, browser(chromium, tmp_path / "profile") as page:
        rank.hello()
        rank.steps(0, [3.0, 2.0])
        page.go(f"{served.url}/#{served.state['token']}&run=r1")
        page.until("document.querySelector('.state.running')")
        page.asked("""(() => {
            window.waits = [];
            const set = setTimeout;
            setTimeout = (called, wait) => set(called, waits.push(wait) && wait);
            Object.defineProperty(document, 'hidden', {value: true});
        })()""")
        rank.steps(2, [math.nan])
        until(lambda: "1 incident open" in served.get("/live?run=r1", headers=served.authorized()).text, "the incident")
        page.asked("refresh()")
        assert page.asked("document.title") == "(1!) train"
        assert page.asked("waits.at(-1)") == 60_000


@pytest.mark.slow
def test_what_screen_readers_read_out_does_not_change_with_each_request(
    served: Served, chromium: str, tmp_path: Path
) -> None:
    with SimulatedRank(served.socket) as rank, browser(chromium, tmp_path / "profile") as page:
        rank.hello()
        rank.steps(0, [3.0])
        page.go(f"{served.url}/#{served.state['token']}&run=r1")
        page.until("document.querySelector('.state.running')")
        page.asked("""(() => {
            window.changes = 0;
            const watch = new MutationObserver(found => { changes += found.length; });
            for (const region of document.querySelectorAll('[role=status]'))
                watch.observe(region, {childList: true, characterData: true, subtree: true});
        })()""")
        shown = page.asked("document.getElementById('moment').textContent")
        page.until(f"document.getElementById('moment').textContent !== {json.dumps(shown)}")
        assert page.asked("changes") == 0
        assert page.asked("document.getElementById('note').textContent") == "Live."


@pytest.mark.slow
@pytest.mark.charts
def test_a_page_with_still_charts_says_when_the_interactive_ones_are_there(
    chromium: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, library = StoredRuns(history(tmp_path / "gpt.sqlite")), fetch_charts.FOLDER
    monkeypatch.setattr(fetch_charts, "FOLDER", tmp_path / "no-library")
    with served_here(stored) as address, browser(chromium, tmp_path / "profile") as page:
        page.go(f"{address}/#token&run=gpt")
        page.until("document.querySelector('path.curve')")
        monkeypatch.setattr(fetch_charts, "FOLDER", library)
        page.asked("refresh()")
        assert page.asked("document.getElementById('note').textContent").endswith("load this page again.")


@pytest.mark.slow
def test_after_a_pause_what_is_opened_is_shown(chromium: str, private_places: Path, tmp_path: Path) -> None:
    runs = private_places / "state" / "runs"
    runs.mkdir(parents=True)
    history(runs / "gpt.sqlite")
    with served_here(StoredRuns()) as address, browser(chromium, tmp_path / "profile") as page:
        page.go(f"{address}/#token")
        page.until("document.querySelector('[data-run=gpt]')")
        page.click("#pause")
        assert page.asked("document.getElementById('note').textContent") == "Paused."
        page.click("[data-run=gpt]")
        page.until("document.querySelector('[data-state=ended]')")
        page.click("#home")
        page.until("document.querySelector('.runs')")
        assert page.asked("document.getElementById('pause').textContent") == "Pause"


@pytest.mark.slow
def test_of_details_of_the_same_name_only_those_that_were_opened_stay_open(chromium: str, tmp_path: Path) -> None:
    cases = [case(number, 20 * number, stacks={"0": "File train.py"}) for number in (1, 2)]
    stored = StoredRuns(history(tmp_path / "gpt.sqlite", cases=tuple(cases)))
    with served_here(stored) as address, browser(chromium, tmp_path / "profile") as page:
        page.go(f"{address}/#token&run=gpt")
        page.until("document.querySelectorAll('details').length === 2")
        page.click("#case-1 summary")
        page.asked("refresh()")
        opened = "[...document.querySelectorAll('details[open]')].map(one => one.closest('article').id)"
        assert page.asked(opened) == ["case-1"]


@pytest.mark.slow
def test_a_context_menu_does_not_stop_the_page(served: Served, chromium: str, tmp_path: Path) -> None:
    """Where the menu opens at the press of the button, the browser gets no release of it."""
    with SimulatedRank(served.socket) as rank, browser(chromium, tmp_path / "profile") as page:
        rank.hello()
        rank.steps(0, [3.0])
        page.go(f"{served.url}/#{served.state['token']}&run=r1")
        page.until("document.querySelector('.state.running')")
        for event in (
            "PointerEvent('pointerdown', {button: 2, bubbles: true})",
            "MouseEvent('contextmenu', {bubbles: true})",
        ):
            page.asked(f"document.querySelector('main').dispatchEvent(new {event})")
        rank.steps(1, [2.0])
        page.until("document.querySelector('header dd').textContent === '1'")
