"""Every view of the page and the report, as a user goes through them in a browser."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sentinel import wire
from sentinel.report.stored_runs import StoredRuns
from sentinel.web import charts
from sentinel.web.page import VIEWS
from tests.browser import browser
from tests.daemon.simulated import SimulatedRank
from tests.report.runs import EVIL, case, history
from tests.waiting import until
from tests.web.conftest import Served, keep_picture, served_here

pytestmark = [pytest.mark.processes, pytest.mark.browser, pytest.mark.usefixtures("driver")]

RANKS, STEPS, BROKEN = 4, 320, 300
LAYERS = tuple(f"blocks.{n}.weight" for n in range(6))
SEEN = {
    "curves": "figure canvas, figure path.curve",
    "incidents": "article.case.critical",
    "layers": "svg[aria-label^='gradient norm'] path.broken",
    "ranks": "svg[aria-label^='time of each rank'] path",
    "gpus": "td",
    "rules": "td",
    "run": "table.summary td",
}
"""For each view, what must be visible in it, as a CSS selector."""

FIGURES = """Object.fromEntries(
    [...document.querySelectorAll('header dt')].map(name => [name.textContent, name.nextSibling.textContent])
)"""


class TrainedRank(SimulatedRank):
    """Rank of a run in which rank 2 is slow, and at one step the loss is NaN and a layer's gradient infinite."""

    def train(self) -> Iterator[None]:
        """Report the steps, and yield after each."""
        names = (wire.Layer(name=name, shape=(8, 8), dtype="float32") for name in LAYERS)
        self.say(wire.LayerTable(digest="d", layers=tuple(names)))
        late = 0.05 * (self.identity.rank == 2)
        columns = {
            "loss": [2 + 3 / (1 + n / 40) + 0.03 * math.sin(1.7 * n) if n < BROKEN else math.nan for n in range(STEPS)],
            "grad_norm": [1 + 0.2 * math.sin(n) if n < BROKEN else math.inf for n in range(STEPS)],
            "learning_rate": [3e-4 * min(1, (n + 1) / 50) for n in range(STEPS)],
            "step_seconds": [0.2] * STEPS,
            "forward_seconds": [0.05 + late] * STEPS,
            "backward_seconds": [0.1 - late + 0.004 * math.sin(n) for n in range(STEPS)],
            "rss_bytes": [2e9 + 1e5 * n for n in range(STEPS)],
        }
        began = time.time() - STEPS / 5
        for n in range(STEPS):
            packed = {name: wire.Column(array("d", [values[n]]).tobytes()) for name, values in columns.items()}
            seqs, times = array("q", [n]).tobytes(), array("d", [began + n / 5]).tobytes()
            self.say(wire.Batch(seqs=seqs, times=times, columns=packed, layers=self._sampled(n)))
            yield

    def _sampled(self, n: int) -> tuple[wire.LayerBlock, ...]:
        if n % 8:
            return ()
        norms = [(1 + at) * (1 + 0.5 * math.sin(n / 9 + at)) for at in range(len(LAYERS))]
        norms[-1] = math.inf if n >= BROKEN else norms[-1]
        return (wire.LayerBlock(seq=n, table="d", stats={"layer_grad_norm": array("f", norms).tobytes()}),)


@pytest.fixture
def broken(served: Served) -> Iterator[Served]:
    """A daemon that watches a run that has become NaN, and another run."""
    with ExitStack() as stack:
        ranks = [stack.enter_context(TrainedRank(served.socket, n, RANKS)) for n in range(RANKS)]
        for rank in ranks:
            gpu = f"0000000{rank.identity.rank % 2}-0000-0000-0000-000000000000"
            rank.say(
                wire.Hello(
                    version="test", identity=rank.identity, gpus=(gpu,),
                    began=time.time() - STEPS / 5 - 9,
                    facts={"model": "GPT", "parameters": 124_000_000, "optimizer": "AdamW", "torch": "2.13"},
                )
            )  # fmt: skip
            rank.expect(wire.Welcome)
        for _ in zip(*(rank.train() for rank in ranks), strict=True):
            pass  # step by step, as the daemon waits two seconds for the last rank of a step
        other = stack.enter_context(SimulatedRank(served.socket, run_id="r2"))
        other.hello()
        other.steps(0, [2.0, 1.0])

        def shown() -> bool:
            text = served.get("/live?run=r1", headers=served.authorized()).text
            return "<dd>319</dd>" in text and "NonFiniteLoss" in text and "gpu_power_watts" in text

        until(shown, "the run's end", 40)
        yield served


def test_a_user_goes_through_the_page(broken: Served, chromium: str, tmp_path: Path) -> None:
    with browser(chromium, tmp_path / "profile") as page:
        page.go(f"{broken.url}/#{broken.state['token']}")
        page.until("document.querySelectorAll('.runs [data-run]').length === 2")
        assert not page.asked("document.getElementById('views').checkVisibility()"), "it has no views"
        page.click("[data-run=r1]")
        page.until("document.querySelector('h1')?.textContent === 'train running'")
        assert page.asked(FIGURES)["step"] == "319"
        assert page.asked("document.title") == "(5!) train"
        keep_picture(page, "page")
        keep_picture(page, "page-dark", scheme="dark", deficiency="deuteranopia")
        for view, seen in SEEN.items():
            page.click(f"#views [data-view={view}]")
            visible = page.asked(
                "[...document.querySelectorAll('main section')].filter(s => !s.hidden).map(s => s.dataset.view)"
            )
            assert visible == [view]
            page.until(f"document.querySelector('section[data-view={view}]').querySelector({json.dumps(seen)})")
            for bar, views in {"filter": ["incidents"], "tools": ["curves"] if charts.is_present() else []}.items():
                shown = page.asked(f"document.getElementById('{bar}').checkVisibility()")
                assert shown == (view in views), f"{bar} in the view {view}"
            keep_picture(page, f"page-{view}")
        assert page.asked("document.getElementById('pause').checkVisibility()")
        page.click("#views [data-view=whole]")
        page.until("document.querySelector('.summary') && document.querySelector('article.case.critical')")
        assert not page.asked("document.getElementById('pause').checkVisibility()"), "it is read once"
        page.click("a.mark b, a.mark text")
        assert page.asked("document.activeElement.id") == "case-1"
        page.click("#views [data-view=all]")
        page.until("document.querySelector('[data-state]')")
        page.click("#firing")
        assert re.fullmatch(r"[1-9] of \d", page.asked("document.getElementById('found').textContent"))
        page.click("#firing")
        page.click("#pause")
        page.click("[data-view=rules] #reload")
        page.until("document.getElementById('answer').textContent.includes('reloaded')")
        page.click("#pause")
        assert page.asked("location.hash") == f"#{broken.state['token']}&run=r1"
        page.click("#home")
        page.until("document.querySelector('.runs')")
        page.click("[data-run=r2]")
        page.until("document.querySelector('header dd')?.textContent === '1'")
        assert page.asked("document.title") == "train"
        assert page.asked("location.hash") == f"#{broken.state['token']}&run=r2"
        assert page.complaints == []


@pytest.fixture
def many(private_places: Path) -> Iterator[str]:
    """The page, without a daemon, of four runs that have ended (the name of one is an attack) and a damaged file."""
    folder = private_places / "state" / "runs"
    folder.mkdir(parents=True)
    for number, (name, speed) in enumerate((("gpt", 1.0), ("gpt", 0.5), ("vit", 2.0), (EVIL, 1.0))):
        cases = (case(1, 123),) if name == "gpt" else ()
        history(folder / f"{number}-run.sqlite", name=name, speed=speed, cases=cases)
    (folder / "torn.sqlite").write_bytes(b"not a database")
    with served_here(StoredRuns()) as address:
        yield f"{address}/#token"


@pytest.mark.slow
def test_all_runs_are_listed_each_with_an_address_of_its_own(many: str, chromium: str, tmp_path: Path) -> None:
    with browser(chromium, tmp_path / "profile") as page:
        page.go(many)
        page.until("document.querySelectorAll('.runs tbody tr').length === 4")
        rows = page.asked(
            "[...document.querySelectorAll('.runs tr:has(td)')].map(r => [...r.children].map(c => c.innerText.trim()))"
        )
        assert page.asked("document.documentElement.scrollWidth <= innerWidth"), "its last columns are off screen"
        assert {row[1].split()[0] for row in rows} >= {"gpt", "vit"}
        assert sum("1 critical" in row[5] for row in rows) == 2
        assert all(row[3] == "199" for row in rows)
        assert "torn.sqlite" in page.asked("document.querySelector('.alarm').textContent")
        page.click("[data-run='2-run']")
        page.until("document.querySelector('h1')?.textContent.startsWith('vit not known')")
        assert page.asked("location.hash") == "#token&run=2-run"
        page.asked("history.back()")
        page.until("document.querySelector('.runs')")
        assert page.asked("location.hash") == "#token"
        page.asked("history.forward()")
        page.until("document.querySelector('h1')?.textContent.startsWith('vit')")
        page.go("about:blank")
        page.go(f"{many}&run=3-run")  # as a message links to it
        page.until("document.querySelector('[data-state=ended]')")
        assert page.asked("document.querySelector('main script')") is None
        assert page.complaints == []


@pytest.mark.slow
@pytest.mark.charts
def test_two_runs_are_compared_in_the_same_charts(many: str, chromium: str, tmp_path: Path) -> None:
    with browser(chromium, tmp_path / "profile") as page:
        page.go(many)
        page.until("document.querySelector('[data-pick]')")
        for run in ("2-run", "0-run", "1-run"):  # of three ticked runs the last two stay
            page.click(f"[data-pick='{run}']")
        page.asked("refresh()")  # the ticks stay
        assert page.asked("[...document.querySelectorAll('[data-pick]:checked')].map(b => b.dataset.pick).sort()") == [
            "0-run", "1-run",
        ]  # fmt: skip
        page.click("#compare")
        page.until("document.querySelectorAll('.charts .uplot').length === 3")
        assert page.asked("location.hash") == "#token&run=0-run&with=1-run"
        labels = page.asked("[...document.querySelectorAll('.u-legend th')].map(h => h.textContent.trim())")
        assert {"gpt (1): loss", "gpt (2): loss"} <= set(labels)
        assert page.asked("document.title") == "gpt (1) against gpt (2)"
        assert page.asked("document.getElementById('views').hidden")
        page.asked("document.querySelector('.charts').previousElementSibling.scrollIntoView({block: 'center'})")
        keep_picture(page, "page-compared")
        assert page.asked("document.querySelectorAll('table.summary thead th').length") == 3
        page.go("about:blank")
        page.go(f"{many}&run=0-run&with=gone")
        page.until("document.querySelector('main .alarm')")
        assert page.complaints == []


@pytest.mark.slow
def test_the_list_has_the_runs_of_other_daemons(broken: Served, chromium: str, tmp_path: Path) -> None:
    with served_here(StoredRuns()) as address, browser(chromium, tmp_path / "profile") as page:
        page.go(f"{address}/#token")
        page.until("document.querySelectorAll('.runs .state.running').length === 2")
        assert page.asked("document.title") == "Sentinel: 2 live"
        keep_picture(page, "page-list")
        page.click("[data-run=r1]")
        page.until("document.querySelector('[data-stored]') && document.querySelector('[data-state=running]')")
        assert page.asked(FIGURES)["step"] == "319"
        head = "document.querySelector('[data-view=gpus] thead th')?.textContent"
        page.until(f"{head} === 'highest'")  # readings are written every few seconds
        assert page.complaints == []


@pytest.mark.slow
def test_the_page_outlives_its_daemon(served: Served, chromium: str, tmp_path: Path) -> None:
    with SimulatedRank(served.socket) as rank, browser(chromium, tmp_path / "profile") as page:
        rank.hello()
        rank.steps(0, [3.0, 2.0, math.nan])
        page.go(f"{served.url}/#{served.state['token']}&run=r1")
        page.until("document.querySelector('a.mark')")
        served.process.kill()
        served.process.wait()
        said = page.until("document.body.classList.contains('stale') && document.getElementById('note').textContent")
        assert re.match(r"The daemon does not answer since \d+:\d\d:\d\d", said)
        assert "`sentinel page r1`" in said
        assert "`sentinel report r1`" in said
        waits = [page.asked("refresh().then(() => wait)") for _ in range(8)]
        assert waits == sorted(waits)
        assert waits[-1] == 60_000
        assert page.asked("document.getElementById('note').textContent") == said  # it is shown once
        assert page.asked("document.querySelectorAll('figure canvas, figure path.curve, article').length") >= 2


@pytest.mark.slow
def test_a_run_that_has_ended_is_marked_and_fetched_seldom(served: Served, chromium: str, tmp_path: Path) -> None:
    with SimulatedRank(served.socket) as rank, browser(chromium, tmp_path / "profile") as page:
        rank.hello()
        rank.steps(0, [3.0, 2.0])
        page.go(f"{served.url}/#{served.state['token']}&run=r1")
        page.until("document.querySelector('.state.running')")
        rank.say(wire.Goodbye(reason="exit"))
        said = page.until("document.querySelector('[data-state=ended]')?.textContent")
        assert re.search(r"train ended at \d\d:\d\d:\d\d", said)
        assert "sentinel report r1" in said
        page.until("wait > OFTEN")
        assert not page.asked("document.getElementById('pause').checkVisibility()")
        assert page.complaints == []


@pytest.mark.slow
def test_on_a_phone_nothing_is_cut_off(broken: Served, chromium: str, tmp_path: Path) -> None:
    with browser(chromium, tmp_path / "profile") as page:
        page.size(390, 844)
        page.go(f"{broken.url}/#{broken.state['token']}")
        page.until("document.querySelector('[data-run=r1]')")
        keep_picture(page, "page-phone-list")
        assert page.asked("document.documentElement.scrollWidth") <= 390
        page.click("[data-run=r1]")
        page.until("document.querySelector('.rows')")
        keep_picture(page, "page-phone")
        assert page.asked("document.documentElement.scrollWidth") <= 390
        ends = page.asked(
            "[...document.querySelectorAll('figure canvas, figure > svg')].map(s => s.getBoundingClientRect().right)"
        )
        assert len(ends) >= 7
        assert max(ends) <= 390  # the newest steps are at the right
        columns = page.asked(
            "getComputedStyle(document.querySelector('.charts')).gridTemplateColumns.split(' ').length"
        )
        assert columns == 1
        page.size(1400, 900)
        assert (
            page.asked("getComputedStyle(document.querySelector('.charts')).gridTemplateColumns.split(' ').length") == 3
        )


@pytest.mark.slow
def test_512_ranks_are_shown_by_node(served: Served, chromium: str, tmp_path: Path) -> None:
    slow, lost = 300, 17
    with ExitStack() as stack:
        ranks = [stack.enter_context(SimulatedRank(served.socket, n, 512, on_a_node=8)) for n in range(512)]
        for rank in ranks:
            rank.hello()
        for rank in ranks:
            seconds = 0.3 if rank.identity.rank == slow else 0.2
            rank.steps(0, [2.0] * 2, step_seconds=[seconds] * 2)  # a daemon waits 2 s for the last rank of a step
        page = stack.enter_context(browser(chromium, tmp_path / "profile"))
        ranks[lost].close()
        page.go(f"{served.url}/#{served.state['token']}&run=r1&view=ranks")
        page.until("document.querySelector('.rank.lost')")
        page.until("document.querySelectorAll('details table tr').length == 1 + 512")
        lines = page.asked("[...document.querySelectorAll('p.matrix')].map(p => p.textContent)")
        assert len(lines) == 64
        assert lines[lost // 8] == "node 2 (host2) oXoooooo"
        assert page.asked("document.querySelector('h1').textContent").endswith("rank 17 lost")
        rows = page.asked("[...document.querySelectorAll('figure.rows text')].map(t => t.textContent)")
        assert f"rank {slow}" in rows
        assert len(rows) == 64 + 2
        keep_picture(page, "page-512-ranks")
        assert not page.asked("document.querySelector('details').open")
        page.click("details > summary")
        page.asked("refreshNow()")
        page.until("document.querySelector('details').open")
        for width in (1400, 390):
            page.size(width, 844)
            assert page.asked("document.documentElement.scrollWidth") <= width
        assert page.complaints == []


@pytest.mark.slow
def test_the_whole_page_can_be_used_by_keyboard(served: Served, chromium: str, tmp_path: Path) -> None:
    with SimulatedRank(served.socket) as rank, browser(chromium, tmp_path / "profile") as page:
        rank.hello()
        rank.steps(0, [3.0, 2.0, math.nan])
        page.go(f"{served.url}/#{served.state['token']}&run=r1")
        page.until("document.querySelector('a.mark')")
        reached = []
        for _ in range(len(VIEWS) + 2):
            page.press("Tab")
            reached.append(page.focused())
        assert reached == ["All runs", *VIEWS.values(), "Pause"]
        page.press("Enter")
        assert page.focused() == "Go on"
        page.press("Enter")
        while not page.asked("document.activeElement.matches('a.mark')"):
            page.press("Tab")
        page.asked("refresh()")  # the element that has the focus is made again
        assert page.asked("document.activeElement.matches('a.mark')")
        page.press("Enter")
        assert page.asked("document.activeElement.id") == "case-1"
        assert page.complaints == []


@pytest.mark.slow
def test_a_page_without_its_token_says_so(served: Served, chromium: str, tmp_path: Path) -> None:
    with browser(chromium, tmp_path / "profile") as page:
        page.go(f"{served.url}/#wrong")
        page.until("document.getElementById('note').textContent.includes('lacks the token')")
        page.click("#views [data-view=whole]")
        page.until("document.getElementById('note').textContent.includes('lacks the token')")
        assert page.asked("document.querySelector('figure, article, table')") is None
        assert all("401" in complaint for complaint in page.complaints)


@pytest.mark.slow
def test_a_user_reads_a_report(chromium: str, tmp_path: Path) -> None:
    stacks = {"0": "File train.py, line 7"}
    one = history(tmp_path / "one.sqlite", name="gpt", ranks=4, gpus=2, cases=(case(1, 123, stacks=stacks),))
    two = history(tmp_path / "two.sqlite", name="gpt_lower_lr", ranks=4, speed=0.5)
    command = [sys.executable, "-m", "sentinel", "report", str(one), str(two), "--output", str(tmp_path / "r.html")]
    subprocess.run(command, check=True, capture_output=True)
    with browser(chromium, tmp_path / "profile") as page:
        page.go(f"file://{tmp_path / 'r.html'}")
        keep_picture(page, "report")
        page.click("a.mark b, a.mark text")
        card = page.asked("(document.querySelector('.case:target') ?? document.activeElement).textContent")
        assert card.startswith("1 LossSpike")
        page.click("details summary")
        assert page.asked("document.querySelector('details').open")
        headings = page.asked("[...document.querySelectorAll('h2')].map(h => h.textContent)")
        assert headings == [
            "Incidents of gpt", "Incidents of gpt_lower_lr", "Curves", "Gradient norm by layer", "Ranks of gpt",
            "Ranks of gpt_lower_lr", "GPUs of gpt", "What was trained",
        ]  # fmt: skip
        assert page.asked("[...document.querySelectorAll('svg')].every(s => s.getBoundingClientRect().height > 5)")
        assert page.complaints == []


@pytest.mark.slow
def test_incidents_are_filtered_and_selected_by_keys(private_places: Path, chromium: str, tmp_path: Path) -> None:
    cases = case(1, 20), case(2, 60, alert="SlowStep", severity="warning"), case(3, 150, state="firing")
    runs = private_places / "state" / "runs"
    runs.mkdir(parents=True)
    history(runs / "4-run.sqlite", cases=cases)
    shown = "[...document.querySelectorAll('article.case')].filter(c => c.checkVisibility()).map(c => c.id)"
    with served_here(StoredRuns()) as address, browser(chromium, tmp_path / "profile") as page:
        many = f"{address}/#token"
        page.go(f"{many}&run=4-run")
        page.until("document.querySelectorAll('article.case').length === 3")
        assert page.asked(shown) == ["case-3", "case-2", "case-1"]  # the newest first
        assert page.asked("document.getElementById('found').textContent") == ""
        for focused in ("case-3", "case-2", "case-1", "case-1"):
            page.press("j")
            assert page.asked("document.activeElement.id") == focused
        page.press("k")
        assert page.asked("document.activeElement.id") == "case-2"
        page.press("/")
        assert page.asked("document.activeElement.id") == "find"
        for letter in "warn":
            page.press(letter)
        assert page.asked(shown) == ["case-2"]
        assert page.asked("document.getElementById('found').textContent") == "1 of 3"
        assert page.asked("location.hash") == "#token&run=4-run&find=warn"
        page.asked("refresh()")  # the filter text stays
        assert page.asked("[document.activeElement.value, document.activeElement.id]") == ["warn", "find"]
        page.press("Escape")
        page.press("j")
        assert page.asked("document.activeElement.id") == "case-2"
        page.go("about:blank")
        page.go(f"{many}&run=4-run&find=critical&open=1")
        page.until("document.querySelector('article.case')")
        assert page.asked(shown) == []  # nothing is open in a run that has ended
        page.click("#firing")
        assert page.asked(shown) == ["case-3", "case-1"]
        page.click("#home")
        page.until("document.querySelector('.runs')")
        assert page.asked("document.getElementById('filter').hidden")
        assert page.complaints == []
