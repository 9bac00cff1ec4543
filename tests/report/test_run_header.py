"""The first lines of the live page."""

from __future__ import annotations

import math
import re
import time
from typing import Any

import msgspec
import pytest

from sentinel.report.content import ChartLine, Report, ReportPanel
from sentinel.report.page import incidents, summary
from sentinel.report.page import ranks as medians
from sentinel.report.ranks import RankRow
from sentinel.report.run_header import run_header
from tests.report.runs import case


def run(*cases: dict[str, Any], last: int = 9, goodput: float = math.nan, **facts: Any) -> Report:
    line = ChartLine("step_seconds", range(last + 1), [0.5] * (last + 1))
    return Report(
        run="gpt", run_id="gpt-1", attempts=1, began=time.time() - 65, seconds=65, first=0, last=last, facts=facts,
        panels=(ReportPanel("step time", "seconds", (line,)),), incidents=cases, rollbacks=(), heat=None, ranks=(),
        devices=(), final_loss=1.25, step_seconds=0.5, goodput=goodput,
    )  # fmt: skip


def rank(number: int, state: str, seconds: float = 0.0, at: str = "") -> dict[str, Any]:
    return {"rank": number, "state": state, "stall": {"seconds": seconds, "at": at}}


def said(report: Report, *ranks: dict[str, Any], **more: Any) -> str:
    status = {"step": 1234, "values": {"loss": 0.5}, "ranks": ranks, "rollback": {"armed": False}} | more
    return re.sub(r"<[^>]*>", " ", run_header(report, status))


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((rank(0, "live"), rank(1, "live")), "running"),
        ((rank(0, "live"), rank(1, "stalled", 72.4, "train.py:7")), "stalled for 72 s at train.py:7"),
        ((rank(0, "live"), rank(1, "silent")), "rank 1 silent"),
        ((rank(0, "live"), rank(1, "lost"), rank(2, "lost")), "ranks 1, 2 lost"),
        ((rank(0, "lost"), rank(1, "gone")), "no rank is connected since"),
        ((rank(0, "gone"), rank(1, "gone")), "ended at"),
        ((), "ended at"),
    ],
)
def test_the_header_says_whether_the_run_goes_on(ranks: tuple[dict[str, Any], ...], words: str) -> None:
    assert words in said(run(), *ranks)


def test_times_have_their_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The browser may be in another one, and its reader."""
    monkeypatch.setenv("TZ", "JST-9")
    time.tzset()
    try:
        assert re.search(r"ended at (\S+ )?\d\d:\d\d:\d\d JST", said(run(), rank(0, "gone")))
        assert re.search(r"<th>began</th><td>[^<]* JST<", summary([run()]))
        assert "2001-09-09 10:46:40 JST" in incidents(run(case(1, 100)), False)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_the_header_has_the_current_figures() -> None:
    text = " ".join(said(run(), rank(0, "live")).split())
    for words in ("step 1,234", "loss 0.5", "steps/s 2", "elapsed 1 min 5 s", "No incident is open."):
        assert words in text
    assert "steps/s 0 " in " ".join(said(run(), rank(0, "stalled", 72.0)).split())


def test_a_loss_that_is_not_reported_is_no_loss_that_is_not_finite() -> None:
    silent = msgspec.structs.replace(run(), final_loss=math.nan)
    ranks = (RankRow(0, 10, None, 0.5, math.nan, math.nan), RankRow(1, 10, math.nan, 0.5, math.nan, math.nan))
    assert "loss -" in " ".join(said(silent, rank(0, "live"), values={}).split())
    assert "<th>loss, last 20 steps</th><td>-</td>" in summary([silent])
    table = medians(msgspec.structs.replace(silent, ranks=ranks))
    assert "<td>0</td><td>10</td><td>-</td>" in table
    assert "<td>1</td><td>10</td><td>not finite</td>" in table
    curve = ReportPanel("loss", "1", (ChartLine("loss", [0, 1], [2.0, math.nan]),))
    broken = msgspec.structs.replace(silent, panels=(curve,))
    assert "loss not finite" in " ".join(said(broken, rank(0, "live"), values={}).split())
    assert "<th>loss, last 20 steps</th><td>not finite</td>" in summary([broken])


def test_the_goodput_is_shown_where_it_is_known_with_what_it_counts() -> None:
    status = {"step": 1, "ranks": [rank(0, "live")], "rollback": {"armed": False}}
    assert "that count" not in run_header(run(), status)
    assert "that count" not in summary([run()])
    for text in (run_header(run(goodput=0.873), status), summary([run(goodput=0.873)])):
        assert re.search("time in steps that count</[a-z]+><[a-z]+>87%<", text)
        assert "goodput" not in text
        assert "The rest: start, evaluations, checkpoints, stalls, restarts" in text


def test_the_header_says_how_long_the_run_will_take() -> None:
    text = " ".join(said(run(total_steps=2000), rank(0, "live")).split())
    assert "step 1,234 " in text
    assert "done 1,235 of 2,000" in text
    assert "left 6 min 22 s" in text  # 765 steps of half a second each
    ended = " ".join(said(run(total_steps=2000), rank(0, "gone")).split())
    assert "done 1,235 of 2,000" in ended
    assert "left" not in ended


def test_the_worst_open_incident_is_a_link_and_all_are_counted_in_the_title() -> None:
    cases = (
        case(1, 100, severity="warning", state="firing"),
        case(2, 110, severity="critical", state="firing", alert="NonFiniteLoss"),
        case(3, 120, severity="critical", state="resolved"),
    )
    text = run_header(run(*cases), {"step": 1, "ranks": [rank(0, "live")], "rollback": {"armed": False}})
    assert 'data-title="(2!) gpt"' in text
    assert '2 incidents open: the worst is <a href="#case-2">NonFiniteLoss, critical, step 110</a>' in text
    assert "id='case-2'" in incidents(run(*cases), False)


def test_a_critical_consequence_is_shown_by_the_name_of_the_problem() -> None:
    cases = (
        case(1, 100, severity="warning", state="firing", alert="GradientsNotCleared"),
        case(2, 110, severity="critical", state="firing", alert="LossSpike", parent="0.1"),
    )
    text = run_header(run(*cases), {"step": 1, "ranks": [rank(0, "live")], "rollback": {"armed": False}})
    assert 'the worst is <a href="#case-1">GradientsNotCleared, critical, step 100</a>' in text


def test_incidents_come_newest_first_with_their_time_and_their_consequences_inside() -> None:
    began = time.time() - 100
    cases = (
        case(1, 100, time=began, resolved_time=began + 72),
        case(2, 110, parent="0.1", time=began + 1),
        case(3, 120, time=began + 90, state="firing", resolved_step=None),
    )
    text = incidents(run(*cases), False)
    places = [text.index(f"id='case-{number}'") for number in (3, 1, 2)]
    assert places == sorted(places)
    assert text.index("1 consequence") < places[2]
    assert text.count("</article>", 0, places[2]) == 1  # the second is inside the first
    assert f"{time.strftime('%Y-%m-%d %H:%M:%S %Z', time.localtime(began))}, for 1 min 12 s" in text
    assert "open for 1" in text


def test_only_the_newest_of_many_incidents_are_shown() -> None:
    text = incidents(run(*(case(number, number) for number in range(1, 61))), False)
    assert "id='case-60'" in text
    assert "id='case-11'" in text
    assert "id='case-10'" not in text
    assert "And 10 before these: sentinel incidents --run gpt-1" in text
