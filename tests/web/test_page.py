"""The live page: an empty shell without the token, everything with it, and how a browser shows it."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from sentinel import web
from sentinel.cli import page as page_command
from sentinel.report.content import ChartLine, Report, ReportPanel
from sentinel.report.live_page import fragment
from sentinel.report.stored_runs import StoredRuns
from sentinel.web.page import VIEWS, shell
from tests.browser import browser
from tests.daemon.simulated import SimulatedRank
from tests.report.runs import case, history
from tests.waiting import until
from tests.web.conftest import Served
from tests.zygote import DAEMON, run_fork

pytestmark = pytest.mark.processes

WEB = Path(web.__file__).parent
OF_THE_REPORT = {"__init__", "chart", "content", "heatmap", "markup", "outcomes", "page", "ranks"}
"""Modules of `sentinel.report` that make a report, or rows of `sentinel last`, without serving a page."""


def live(served: Served, run: str = "r1") -> str:
    return served.get(f"/live?run={run}", headers=served.authorized()).text


def test_the_shell_holds_no_data_and_a_strict_policy(served: Served) -> None:
    with SimulatedRank(served.socket) as rank:
        rank.hello()
        rank.steps(0, [1.0, 2.0])
        until(lambda: "train" in live(served), "the run")
        empty = served.get("/")
    assert "train" not in empty.text
    assert "script-src 'self'" in empty.headers["content-security-policy"]
    assert not re.search(r"<script(?! src=\"/(page|charts|uplot)\.js\")| on\w+=", empty.text)
    for script in re.findall(r'<script src="([^"]+)"', empty.text):
        assert served.get(script).headers["content-type"].startswith("text/javascript")


@pytest.mark.usefixtures("still_charts")
def test_without_the_library_the_page_has_still_charts_and_says_which_command_brings_it(tmp_path: Path) -> None:
    stored = StoredRuns(history(tmp_path / "gpt.sqlite"))
    for text in (asyncio.run(stored.render_live("gpt")), asyncio.run(stored.render_whole(["gpt"], None))):
        assert text.count('class="curve s0"') == 3
        assert "Interactive charts are missing: <code>python -m sentinel.web.fetch_charts</code> brings them." in text
        assert "data-plot" not in text
    assert "uplot.js" not in shell()


def test_the_page_is_at_most_1500_lines_of_code() -> None:
    """These are scripts, styles, HTML, and the Python that makes it.

    Cards, tables and still charts belong to the report; the HTTP server does not count, and neither does uPlot.
    """
    served = {*WEB.glob("*.js"), *WEB.glob("*.css"), WEB / "page.py", WEB / "charts.py"}
    report = {path for path in (WEB.parent / "report").glob("*.py") if path.stem not in OF_THE_REPORT}
    assert sum(len(path.read_text().splitlines()) for path in served | report) <= 1500


def test_the_live_part_requires_the_token(served: Served) -> None:
    assert served.get("/live").status_code == 401
    assert served.get("/live", headers={"Authorization": "Bearer wrong"}).status_code == 401


def test_no_path_leads_to_files(served: Served) -> None:
    for path in ("/../etc/passwd", "/page.js/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/live/.."):
        answer = served.get(path, headers=served.authorized())
        assert "root:" not in answer.text
        assert answer.status_code in (200, 404), path  # 200 if the client shortened it to /


def test_the_page_shows_curves_and_ranks(served: Served) -> None:
    with SimulatedRank(served.socket, 0, 2) as first, SimulatedRank(served.socket, 1, 2) as second:
        first.hello()
        second.hello()
        for rank in (first, second):
            rank.steps(0, [3.0, 2.0, 1.0])
        text = until(lambda: "<dd>2</dd>" in (found := live(served)) and found, "the steps")
    assert "<figure" in text
    assert text.count('<span class="rank live"') == 2
    assert "<h2>Rules</h2>" in text


def test_an_unknown_run_is_reported(served: Served) -> None:
    for path in ("/live?run=../../x", "/live", "/whole?run=../../x", "/whole"):
        answer = served.get(path, headers=served.authorized())
        assert answer.status_code == 200, path
        assert "is watched or kept on this node" in answer.text


def test_layers_in_the_same_state_are_one_row_of_the_rules() -> None:
    def row(name: str, state: str, share: float) -> dict[str, object]:
        values = {"layer_grad_zero_share": share}
        return {"rule": "DeadLayer", "entity": ("layer", name), "state": state, "lacking": [], "values": values}

    rules = [row("a", "warming", 0.5), row("b", "warming", 0.25), row("c", "firing", 1.0), row("d", "firing", 1.0)]
    status = {"open_incidents": 0, "step": 1, "ranks": [], "rules": rules, "rollback": {"armed": False}}
    content = Report(
        run="gpt", run_id="gpt", attempts=1, began=0, seconds=1, first=0, last=1, facts={}, panels=(), incidents=(),
        rollbacks=(), heat=None, ranks=(), devices=(), final_loss=1.0,
    )  # fmt: skip
    said = fragment(content, status)
    cells = re.findall(r"<td>([^<]*)</td>", said[said.index("<h2>Rules</h2>") :])
    assert cells[:12] == [
        "DeadLayer", "layer c", "firing", "layer_grad_zero_share 1",
        "DeadLayer", "layer d", "firing", "layer_grad_zero_share 1",
        "DeadLayer", "2 layers", "warming", "layer_grad_zero_share 0.25 to 0.5",
    ]  # fmt: skip


def test_rules_that_are_left_out_of_the_table_are_counted() -> None:
    rules = [
        {"rule": "DeadLayer", "entity": ("layer", f"{n}"), "state": "firing", "lacking": [], "values": {}}
        for n in range(412)
    ]
    status = {"step": 1, "ranks": [], "rules": rules, "rollback": {"armed": False}}
    content = Report(
        run="gpt", run_id="gpt", attempts=1, began=0, seconds=1, first=0, last=1, facts={}, panels=(), incidents=(),
        rollbacks=(), heat=None, ranks=(), devices=(), final_loss=1.0,
    )  # fmt: skip
    said = fragment(content, status)
    assert said.count("<td>DeadLayer</td>") == 400
    assert "And 12 more rows: <code>sentinel rules status</code>" in said


def test_a_node_of_a_job_is_a_row_with_its_ranks_and_the_incidents_that_it_was_in() -> None:
    node = {"node": 1, "hostname": "host1", "state": "alive", "silent_seconds": 0.0, "step": 1234,
            "ranks": {"8": 1234, "9": 1233, "10": 1234}}  # fmt: skip
    job = {"view": "joined", "node": 0, "address": "host0:1", "coordinator_silent_seconds": 0.0, "expected": 2,
           "nodes": [node, node | {"node": 0, "ranks": {}}],
           "blame": {"1": 4}, "blamed_incidents": 6}  # fmt: skip
    status = {"open_incidents": 0, "step": 1, "ranks": [], "rules": [], "rollback": {"armed": False}, "job": job}
    content = Report(
        run="gpt", run_id="gpt", attempts=1, began=0, seconds=1, first=0, last=1, facts={}, panels=(), incidents=(),
        rollbacks=(), heat=None, ranks=(), devices=(), final_loss=1.0,
    )  # fmt: skip
    said = fragment(content, status)
    cells = re.findall(r"<td>([^<]*)</td>", said[said.index("<h2>Nodes</h2>") :])
    assert cells[:6] == ["0", "host1", "alive", "1,234", "", ""]
    assert cells[6:12] == ["1", "host1", "alive", "1,234", "ranks 8 to 10", "4 of 6"]


def test_what_a_run_reports_is_shown_as_text() -> None:
    evil = "<img src=x onerror=alert(1)>\"'"
    panel = ReportPanel("loss", "1", (ChartLine("loss", [0, 1], [1.0, 2.0]),))
    content = Report(
        run=evil, run_id=evil, attempts=1, began=0, seconds=1, first=0, last=1, facts={"model": evil}, panels=(panel,),
        incidents=(), rollbacks=(), heat=None, ranks=(), devices=((evil, {evil: 1.0}),), final_loss=1.0,
    )  # fmt: skip
    rule = {"rule": evil, "entity": ("rank", evil), "state": evil, "lacking": [evil], "values": {}}
    status = {"open_incidents": 0, "step": 1, "ranks": [], "rules": [rule], "rollback": {"armed": False}}
    said = fragment(content, status)
    assert "<img" not in said


def test_the_command_prints_the_address(served: Served) -> None:
    with SimulatedRank(served.socket) as rank:
        rank.hello()
        done = run_fork([sys.executable, "-m", "sentinel", "page", "--json"], DAEMON)
    (row,) = json.loads(done.stdout)
    assert row["page"] == f"{served.url}/#{served.state['token']}"
    assert row["runs"] == ["train"]


@pytest.fixture
def stored(tmp_path: Path, private_places: Path) -> Iterator[subprocess.Popen[str]]:
    """`sentinel page` for a run that has ended."""
    file = history(tmp_path / "gpt.sqlite", ranks=2, gpus=1, cases=(case(1, 123) | {"state": "firing"},))
    command = [sys.executable, "-m", "sentinel", "page", str(file), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def address_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return the (address, token) that it printed."""
    assert process.stdout is not None
    (row,) = json.loads("".join(iter(process.stdout.readline, "]\n")) + "]")
    assert row["runs"] == ["gpt"]
    url, _, behind = row["page"].partition("/#")
    token, _, run = behind.partition("&run=")
    assert run == "gpt"
    return url, token


@pytest.mark.slow
def test_a_run_that_has_ended_is_served_from_its_history(stored: subprocess.Popen[str]) -> None:
    url, token = address_of(stored)
    allowed = {"Authorization": f"Bearer {token}"}
    assert httpx2.get(f"{url}/live").status_code == 401
    text = httpx2.get(f"{url}/live?run=gpt", headers=allowed).text
    for words in (
        'data-state="ended"',
        "last seen at",
        "1 incident open at the end",
        "<dd>199</dd>",
        "until the end",
        "<figure",
    ):
        assert words in text
    assert "until the end" in httpx2.get(f"{url}/whole?run=gpt", headers=allowed).text
    (run,) = httpx2.get(f"{url}/api/status", headers=allowed).json()["runs"]
    assert (run["run"], run["step"], run["ranks"]) == ("gpt", 199, [])
    assert len(httpx2.get(f"{url}/api/incidents", headers=allowed).json()) == 1
    assert "no daemon is here" in httpx2.post(f"{url}/-/reload", headers=allowed).text
    stored.send_signal(signal.SIGINT)
    assert stored.wait(60) == 0
    assert stored.stderr is not None
    assert stored.stderr.read() == ""


@pytest.mark.slow
@pytest.mark.browser
def test_every_view_of_a_run_that_has_ended(stored: subprocess.Popen[str], chromium: str, tmp_path: Path) -> None:
    url, token = address_of(stored)
    with browser(chromium, tmp_path / "profile") as page:
        page.go(f"{url}/#{token}&run=gpt")
        page.until("document.querySelectorAll('.charts path.curve, .charts canvas').length >= 3")
        assert page.asked("document.title") == "(1!) gpt"
        for view in VIEWS:
            page.click(f"#views [data-view={view}]")
            page.until("document.querySelector('h2')")
        page.until("document.querySelector('table.summary') && document.querySelector('article')")
        assert page.complaints == []


def test_a_run_that_is_not_there_is_one_sentence(private_places: Path) -> None:
    done = run_fork([sys.executable, "-m", "sentinel", "page", "nope"], DAEMON)
    assert done.returncode == 2
    assert done.stderr == "sentinel: no history of nope; no run is kept on this node\n"


def test_where_there_is_nothing_to_show_the_exit_code_is_1(private_places: Path) -> None:
    done = run_fork([sys.executable, "-m", "sentinel", "page"], DAEMON)
    nothing = "No daemon of yours serves a page on this node, and no history of a run is kept.\n"
    assert (done.returncode, done.stdout) == (1, nothing)


def test_for_a_watched_run_the_daemons_page_is_named(served: Served) -> None:
    with SimulatedRank(served.socket) as rank:
        rank.hello()
        until(lambda: "train" in live(served), "the run")
        done = run_fork([sys.executable, "-m", "sentinel", "page", "train"], DAEMON)
    assert (done.returncode, done.stdout) == (0, f"{served.url}/#{served.state['token']}&run=r1\n")


def test_a_browser_is_not_given_the_token_on_its_command_line(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All users of a machine can see the command line."""
    program = tmp_path / "browser"
    program.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    program.chmod(0o700)
    monkeypatch.setenv("BROWSER", f"{program} %s")
    for _ in range(2):
        done = run_fork([sys.executable, "-m", "sentinel", "page", "--open"], DAEMON)
        assert (done.returncode, done.stderr) == (0, "")
    opened = (tmp_path / "opened").read_text().strip()
    file = Path(opened.removeprefix("file://"))
    assert served.state["token"] not in opened
    assert f"url={done.stdout.strip()}" in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_each_of_several_addresses_names_its_runs() -> None:
    row = {"pid": 1, "page": "http://127.0.0.1:9477/#t", "runs": ["gpt", "vit"]}
    assert page_command._line(row, alone=True) == row["page"]
    assert page_command._line(row, alone=False) == f"{row['page']}  gpt, vit"
