"""The report: its content, and what must not be in it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import math
import random
import re
import sqlite3
import time
from array import array
from collections.abc import Sequence
from html import unescape
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from sentinel import wire
from sentinel.cli import cli
from sentinel.errors import ConfigError
from sentinel.report import live
from sentinel.report.chart import AxisScale, Band, Drawn, Mark, Plot, chart, readable
from sentinel.report.content import ChartLine, report
from sentinel.report.interactive import POINTS, figure
from sentinel.report.outcomes import describe_run
from sentinel.report.page import page
from sentinel.report.page import ranks as ranks_of
from sentinel.report.stored_runs import StoredRuns
from sentinel.runs import Run
from sentinel.runs.steps import LayerStats, RunStep
from sentinel.store import CHUNK_STEPS, History, Store, reader, thinning
from sentinel.store.retention import StoredHistory
from sentinel.text import spell_controls
from tests.report.runs import EVIL, case, history


def called(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["report", *map(str, arguments)])


def written(path: Path, *histories: Path) -> str:
    done = called(*histories, "--output", path)
    assert done.exit_code == 0, done.exception
    return path.read_text()


def test_a_run_is_read_whole(tmp_path: Path) -> None:
    with History(history(tmp_path / "gpt.sqlite", ranks=3, cases=(case(1, 123),))) as kept:
        one = report(kept)
    assert (one.run, one.first, one.last, one.attempts) == ("gpt", 0, 199, 1)
    assert [panel.title for panel in one.panels] == ["loss", "step time", "memory"]
    assert [(undone.to, undone.at) for undone in one.rollbacks] == [(50, 123)]  # not the one that failed
    assert [row.step_seconds for row in one.ranks] == pytest.approx([0.1, 0.2, 0.3])
    assert one.final_loss == pytest.approx(1 / 190, rel=0.05)


def test_of_two_runs_the_facts_that_differ_are_bold(tmp_path: Path) -> None:
    with History(history(tmp_path / "gpt.sqlite")) as kept:
        one = report(kept)
    first, second = (
        msgspec.structs.replace(one, facts={"model": "GPT", "optimizer": name}) for name in ("AdamW", "Muon")
    )
    text = page([first, second], "0")
    assert "<b>AdamW</b></td><td><b>Muon</b>" in text
    assert "<span>GPT</span></td><td><span>GPT</span>" in text
    assert "<span>AdamW</span>" in page([first], "0")


def test_readings_of_devices_are_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight GPUs over weeks they were unpacked once for each signal, for longer than a browser waits."""
    unpacked: list[bytes] = []
    unpack = reader.unpack_chunk
    monkeypatch.setattr(reader, "unpack_chunk", lambda body: unpacked.append(body) or unpack(body))
    counts = []
    for gpus in (0, 3):
        unpacked.clear()
        with History(history(tmp_path / f"gpt-{gpus}.sqlite", gpus=gpus)) as kept:
            assert len(report(kept).devices) == gpus
        counts.append(len(unpacked))
    assert counts[1] - counts[0] == 3


def test_only_events_that_are_shown_are_read(tmp_path: Path) -> None:
    """Of a long run there are a hundred thousand snapshots, and the page's list is read every ten seconds."""
    path = history(tmp_path / "gpt.sqlite")
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("INSERT INTO events VALUES (1e9, 0, 5, 'snapshot', x'c1')")
    with History(path) as kept:
        assert report(kept, over=True).outcome == "not known: its history lacks its end"
        assert describe_run(kept, StoredHistory(path, 0, 0.0), [], None)["step"] == 199


def test_the_goodput_counts_the_steps_that_stand(tmp_path: Path) -> None:
    store = Store(tmp_path / "gpt.sqlite", run="gpt", run_id="gpt")
    for attempt, offset, began, ended in ((0, 0, 1000.0, 1120.0), (1, 80, 1130.0, 1200.0)):
        store.records.begin_attempt(attempt, msgspec.msgpack.encode({"step_offset": offset}), began)
        for seq in range(100 - offset):
            values = {"step_seconds": 1.0}
            store.records.add_step(attempt, RunStep(seq, began + seq, {0: values}, values))
        store.records.end_attempt(attempt, ended)
    for to, at in ((40, 50), (45, 60), (85, 90)):  # the second attempt did the steps from 80 on again
        store.records.add_event(0, at, "rollback", ok=True, alert="LossSpike", to=to, at=at)
    store.close()
    with History(tmp_path / "gpt.sqlite") as kept:
        found = report(kept, over=True)
    assert (found.seconds, found.goodput) == (200.0, pytest.approx(80 / 200))


def test_the_usual_time_of_a_step_is_not_that_of_the_slow_ones_that_a_long_run_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of old steps the first of so many is kept, and the slowest: the median of those was a third too high. An attempt
    that is short has all of its steps."""
    monkeypatch.setattr(thinning, "LEVELS", ((512, 16), (1 << 20, 512)))
    monkeypatch.setattr(thinning, "GROUP", 2)
    draw, store = random.Random(0), Store(tmp_path / "gpt.sqlite", run="gpt", run_id="gpt")
    hello = msgspec.msgpack.encode({})
    store.records.begin_attempt(0, hello, 0.0)
    for rank in (0, 1):
        store.records.add_rank(0, rank, process=1, hello=hello)
    now = 0.0
    for seq in range(16_384):
        ranks = {rank: {"loss": draw.random(), "step_seconds": 0.5 + draw.random()} for rank in (0, 1)}
        now += ranks[1]["step_seconds"]
        store.records.add_step(0, RunStep(seq, now, ranks, ranks[1]))
        if seq % CHUNK_STEPS == 0:
            store.write()
    store.records.end_attempt(0, now)
    store.write()
    with History(tmp_path / "gpt.sqlite") as kept:
        assert len(kept.series("loss").seqs) < 16_384 / 4
        found = report(kept, over=True)
    assert found.step_seconds == pytest.approx(1.0, rel=0.1)
    assert found.goodput == pytest.approx(1.0, rel=0.1)
    assert [row.step_seconds for row in found.ranks] == pytest.approx([1.0, 1.0], rel=0.1)
    assert [row.loss for row in found.ranks] == pytest.approx([0.5, 0.5], rel=0.1)
    assert [row.samples for row in found.ranks] == [1024, 1024]
    store.records.begin_attempt(1, msgspec.msgpack.encode({"step_offset": 16_384}), now)
    for rank in (0, 1):
        store.records.add_rank(1, rank, process=2, hello=hello)
    for seq in range(20):
        ranks = {rank: {"loss": 1.0, "step_seconds": 1.0 + rank} for rank in (0, 1)}
        store.records.add_step(1, RunStep(seq, now + seq, ranks, ranks[1]))
    store.close()
    with History(tmp_path / "gpt.sqlite") as kept:
        found = report(kept, over=True)
    assert [row.samples for row in found.ranks] == [20, 20]
    assert found.step_seconds == pytest.approx(1.0, rel=0.1)
    assert "<th>samples</th>" in ranks_of(found)


def test_a_run_that_was_resumed_from_further_back_stands_where_it_came_to(tmp_path: Path) -> None:
    store = Store(tmp_path / "gpt.sqlite", run="gpt", run_id="gpt")
    for attempt, offset, steps in ((0, 0, 100), (1, 40, 20)):
        store.records.begin_attempt(attempt, msgspec.msgpack.encode({"step_offset": offset}))
        for seq in range(steps):
            values = {"loss": 1.0}
            store.records.add_step(attempt, RunStep(seq, 1e9 + seq, {0: values}, values))
    store.close()
    said = re.sub(r"<[^>]*>", " ", asyncio.run(StoredRuns(tmp_path / "gpt.sqlite").render_live("gpt")))
    assert "step 59" in " ".join(said.split())


def test_a_logged_number_named_as_a_chart_has_a_chart_of_its_own(tmp_path: Path) -> None:
    store = Store(tmp_path / "gpt.sqlite", run="gpt", run_id="gpt")
    store.records.begin_attempt(0, msgspec.msgpack.encode({}))
    values = {"loss": 1.0, "rss_bytes": 2e9, "memory": 3.0}
    store.records.add_step(0, RunStep(0, 1e9, {0: values}, values))
    store.close()
    text = written(tmp_path / "r.html", tmp_path / "gpt.sqlite")
    assert re.findall(r'aria-label="([^"]*) over steps', text) == ["loss", "memory", "memory (logged)"]


def test_how_a_run_ended_is_said_as_in_the_list_of_runs(tmp_path: Path) -> None:
    kept = history(tmp_path / "gpt.sqlite")  # it lacks the end
    header = asyncio.run(StoredRuns(kept).render_live("gpt")).partition("</header>")[0]
    assert "not known: its history lacks its end; last seen at " in header
    assert "ended at" not in header
    assert "<th>outcome</th><td>not known: its history lacks its end</td>" in written(tmp_path / "r.html", kept)


def test_the_goodput_of_a_live_run_is_that_of_its_first_attempt() -> None:
    run = Run("gpt", "gpt", 0.0)
    identity = wire.Identity(run="gpt", run_id="gpt")
    rank, _ = run.hello(wire.Hello(version="t", identity=identity), 0.0)
    seqs, times = array("q", range(100)).tobytes(), array("d", range(100)).tobytes()
    columns = {"step_seconds": wire.Column(values=array("d", [0.1] * 100).tobytes())}
    run.attempt.take(rank, wire.Batch(seqs=seqs, times=times, columns=columns), 0.0)
    assert len(list(run.attempt.take_closed(0.0))) == 100
    run.began = time.time() - 1000.0
    assert live.LiveRun(run, [], []).make_report().goodput == pytest.approx(0.01, rel=0.1)
    assert live.LiveRun(run, [], [(19, 69)]).make_report().goodput == pytest.approx(0.005, rel=0.1)
    run.attempt.number = 1
    assert math.isnan(live.LiveRun(run, [], []).make_report().goodput)


def test_the_layers_of_a_live_run_are_read_when_its_report_is_made() -> None:
    """A daemon begins the report in its loop, which serves ranks, and makes it on a thread."""
    read = list[str]()

    class Statistics(dict[str, Sequence[float]]):
        def get(self, name: str, default: Any = None) -> Any:
            read.append(name)
            return super().get(name, default)

    run = Run("gpt", "gpt", 0.0)
    for seq in range(3):
        layers = LayerStats(("head",), Statistics(layer_grad_norm=array("f", [1.0])), b"\1")
        run.attempt.recent_layers.append((seq, layers))
    state = live.LiveRun(run, [], [])
    assert read == []
    run.attempt.recent_layers.clear()  # the run goes on meanwhile
    heat = state.make_report().heat
    assert heat is not None
    assert heat.values == ((1.0,) * 3,)


def test_the_heat_map_keeps_the_worst_of_each_column(tmp_path: Path) -> None:
    with History(history(tmp_path / "gpt.sqlite", steps=8 * 500)) as kept:
        heat = report(kept).heat
    assert heat is not None
    assert len(heat.steps) <= 120
    assert math.inf in heat.values[heat.rows.index("blocks.1.weight")]


@pytest.mark.usefixtures("still_charts")
def test_incidents_are_on_the_curves_with_their_cases_below(tmp_path: Path) -> None:
    text = written(tmp_path / "r.html", history(tmp_path / "gpt.sqlite", cases=(case(1, 123),)))
    assert text.count('class="mark critical"') == 3  # one on each chart
    for words in ("a bad batch", "confidence: medium", "skip it", "rolled back to step 50", "since", "step 120"):
        assert words in text
    assert "<title>not finite</title>" in text
    assert 'class="band"' in text


def test_an_alert_that_fires_until_the_end_of_its_run_is_shown_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = history(tmp_path / "gpt.sqlite", cases=(case(1, 123) | {"state": "firing"},))
    assert "critical, until the end, step 123" in written(tmp_path / "r.html", kept)
    (one,) = json.loads(called(kept, "--json").stdout)
    assert [(told["state"], told["over"]) for told in one["incidents"]] == [("unresolved", True)]
    with History(kept) as opened:
        live = {opened.run_id}
    monkeypatch.setattr("sentinel.cli.report.list_runs", lambda: [{"run_id": one} for one in live])
    assert "critical, firing, step 123" in written(tmp_path / "r.html", kept)


def test_former_names_of_states_are_read(tmp_path: Path) -> None:
    kept = history(tmp_path / "gpt.sqlite", cases=(case(1, 123) | {"state": "rolled back"},))
    with History(kept) as found:
        assert [case["state"] for case in found.incidents()] == ["rolled_back"]
    assert "critical, rolled back, step 123" in written(tmp_path / "r.html", kept)


def test_gpus_are_described_by_their_highest_readings_with_units(tmp_path: Path) -> None:
    text = written(tmp_path / "r.html", history(tmp_path / "gpt.sqlite", gpus=2))
    rows = {row.partition("</td>")[0]: re.findall(r"<td>([^<]*)</td>", row) for row in text.split("<tr><td>")[1:]}
    assert "GPUs of gpt" in text
    assert rows["gpu_temperature_celsius"] == ["76 °C", "77 °C"]
    assert rows["gpu_memory_used_bytes"] == ["61 GB", "61 GB"]


@pytest.mark.usefixtures("still_charts")
def test_two_runs_are_drawn_apart(tmp_path: Path) -> None:
    one, other = history(tmp_path / "one.sqlite", name="first"), history(tmp_path / "two.sqlite", name="second")
    text = written(tmp_path / "r.html", one, other)
    assert "first against second" in text
    assert "second: loss" in text
    assert 'class="curve s1"' in text


@pytest.mark.usefixtures("still_charts")
def test_two_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    one, other = history(tmp_path / "one.sqlite"), history(tmp_path / "two.sqlite")
    text = written(tmp_path / "r.html", one, other)
    for words in ("gpt (1) against gpt (2)", "gpt (1): loss", "gpt (2): loss", "Incidents of gpt (2)"):
        assert words in text
    assert "(1)" not in written(tmp_path / "r.html", one)


@pytest.mark.usefixtures("still_charts")
def test_what_a_run_reports_is_text_and_nothing_else(tmp_path: Path) -> None:
    evil = case(1, 123, summary=EVIL, alert=EVIL, severity=EVIL, state=EVIL, done=[EVIL], stacks={EVIL: EVIL},
                layers=[{"name": EVIL}], diagnosis={"cause": EVIL, "confidence": EVIL, "remedy": EVIL})  # fmt: skip
    text = written(tmp_path / "r.html", history(tmp_path / "gpt.sqlite", name=EVIL, ranks=2, cases=(evil,)))
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert not re.search(r'="[^"]*<', text)
    assert spell_controls(text) == text
    assert spell_controls(EVIL[-4:]) in text


@pytest.mark.usefixtures("still_charts")
def test_without_the_library_a_report_has_still_charts_and_says_which_command_brings_it(tmp_path: Path) -> None:
    text = written(tmp_path / "r.html", history(tmp_path / "gpt.sqlite"))
    assert text.count('class="curve s0"') == 3
    assert "Interactive charts are missing: <code>python -m sentinel.web.fetch_charts</code> brings them." in text
    assert "script-src 'none'" in text
    assert "<script" not in text


@pytest.mark.charts
def test_what_a_run_reports_is_no_script_in_an_interactive_report(tmp_path: Path) -> None:
    evil = case(1, 123, summary=EVIL, alert=EVIL, severity=EVIL)
    text = written(tmp_path / "r.html", history(tmp_path / "gpt.sqlite", name=EVIL, cases=(evil,)))
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert "script-src " + " ".join(f"'sha256-{one}'" for one in hashes) + ";" in text
    assert len(hashes) == text.count("<script") == 3
    assert EVIL not in text
    held = [json.loads(unescape(attribute)) for attribute in re.findall(r'data-(?:plot|grid)="([^"]*)"', text)]
    assert spell_controls(EVIL) in held[0]["marks"][0]["title"]
    for text in (json.dumps(content, ensure_ascii=False) for content in held):
        assert "\\u00" not in text  # the form in which JSON writes control characters
        assert "\u202e" not in text


def points(values: Sequence[float], steps: Sequence[float] | None = None) -> list[tuple[float, float | None]]:
    """Return the points that a page draws of a line, of all its parts one after the other."""
    line = ChartLine("loss", range(len(values)) if steps is None else steps, values)
    text = figure(Plot("loss", "1", [Drawn(line, "loss", 0)], (0, len(values))))
    plot = json.loads(unescape(re.findall(r'data-plot="([^"]*)"', text)[0]))
    return [point for part in plot["lines"] for point in zip(accumulate(part["steps"]), part["values"], strict=True)]


def test_a_long_run_is_drawn_by_the_extremes_of_its_parts() -> None:
    values = [1.0] * 100_000
    values[77_777], values[5] = 50.0, math.nan
    drawn = points(values)
    assert len(drawn) <= 2 * POINTS
    assert (77_777, 50.0) in drawn
    assert (5, None) in drawn
    assert drawn == sorted(drawn, key=lambda point: point[0])


def test_a_short_run_is_drawn_whole() -> None:
    assert points([0.25, math.inf, 1 / 3]) == [(0, 0.25), (1, None), (2, 0.333333)]


def test_an_attempt_that_begins_again_earlier_is_a_line_of_its_own() -> None:
    assert points([1.0, 2.0, 3.0, 4.0], [0, 1, 1, 2]) == [(0, 1.0), (1, 2.0), (1, 3.0), (2, 4.0)]


def test_the_file_loads_nothing_from_the_network(tmp_path: Path) -> None:
    text = written(tmp_path / "r.html", history(tmp_path / "gpt.sqlite", cases=(case(1, 123),)))
    assert "default-src 'none'" in text
    text = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)  # the policy blocks their requests
    assert not re.search(r"(src|href)=(?!\"(data:|#case-))|url\(|@import|https?://", text)


def test_a_curve_is_no_larger_than_the_screen() -> None:
    """100,000 steps are drawn as two points for each pixel, and a spike of one step is still visible."""
    values = [1.0] * 100_000
    values[77_777] = 50.0
    drawn = chart(Plot("loss", "1", [Drawn(ChartLine("loss", range(100_000), values), "loss", 0)], (0, 99_999)))
    assert len(drawn) < 40_000
    (path,) = re.findall(r'<path d="([^"]+)" class="curve s0"', drawn)
    heights = [float(point.split()[1]) for point in re.split("[ML]", path) if point]
    assert max(heights) - min(heights) > 100


def test_no_line_leads_over_steps_that_were_rolled_back_and_forgotten() -> None:
    line = ChartLine("loss", [*range(50), *range(80, 100)], [1.0] * 70)
    pieces = {}
    for bands in ((), (Band(49, 80, ""),)):
        drawn = chart(Plot("loss", "1", [Drawn(line, "loss", 0)], (0, 99), bands=bands))
        pieces[bands] = len(re.findall("M", re.findall(r'<path d="([^"]+)" class="curve s0"', drawn)[0]))
    assert list(pieces.values()) == [1, 2]


def test_numbers_of_incidents_lie_neither_on_the_title_nor_on_each_other() -> None:
    line = ChartLine("loss", range(100), [1.0] * 100)
    marks = [Mark(step, str(number), "critical", "") for number, step in enumerate((0, 60, 60, 61, 99), 1)]
    drawn = chart(Plot("loss", "1", [Drawn(line, "loss", 0)], (0, 199), marks))
    places = re.findall(r'<text x="([\d.]+)" y="(\d+)" class="middle">(\d)</text></a>', drawn)
    assert [(y, number) for _, y, number in places] == [("24", "1"), ("12", "2"), ("24", "3"), ("36", "4"), ("12", "5")]


@pytest.mark.parametrize("values", [(0.0, 0.9), (0.0, 9.0), (2.0, 2.004), (1e-9, 9e-8)])
def test_a_scale_of_any_size_has_a_few_ticks(values: tuple[float, float]) -> None:
    assert 3 <= len(AxisScale.fit_values(values).ticks()) <= 6


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (0.00025, "1", "2.5e-4"),
        (150_000, "1", "1.5e5"),
        (10_000, "1", "10,000"),
        (2.5, "1", "2.5"),
        (61e9, "bytes", "61 GB"),
        (0.0975, "seconds", "97.5 ms"),
        (64.0, "celsius", "64 °C"),
    ],
)
def test_ticks_are_labelled_with_value_and_unit(value: float, unit: str, words: str) -> None:
    assert readable(value, unit) == words


@pytest.mark.parametrize("values", [(-1.7e308, 0.0, 1.7e308), (1.7e308,) * 3, (5e-324, 1.0, 1.7e308)])
def test_values_further_apart_than_a_float_holds_are_drawn(values: tuple[float, ...]) -> None:
    drawn = chart(Plot("loss", "1", [Drawn(ChartLine("loss", range(3), values), "loss", 0)], (0, 2)))
    assert "nan" not in drawn
    assert "inf" not in drawn


def test_a_curve_begins_at_its_first_value_and_ends_at_its_last() -> None:
    drawn = chart(Plot("loss", "1", [Drawn(ChartLine("loss", (0, 50, 99), (3.0, 2.0, 1.0)), "loss", 0)], (0, 99)))
    (path,) = re.findall(r'<path d="M([^"]*)" class="curve', drawn)
    points = [tuple(map(float, point.split())) for point in path.split("L")]
    assert len(points) == 3
    assert points == sorted(points), "to the right, and down"


def test_long_runs_of_many_ranks_stay_small(tmp_path: Path) -> None:
    with History(history(tmp_path / "gpt.sqlite", steps=10_000, ranks=8)) as kept:
        text = page([report(kept)], "0")
    assert len(text) < 400_000


def test_json_has_the_figures(tmp_path: Path) -> None:
    (one,) = json.loads(called(history(tmp_path / "gpt.sqlite", cases=(case(1, 123),)), "--json").output)
    assert (one["run"], one["last_step"], len(one["incidents"])) == ("gpt", 199, 1)


@pytest.mark.parametrize("name", ["nothing", "../../etc/passwd", "/etc/passwd"])
def test_a_run_that_is_not_there_is_a_sentence(name: str) -> None:
    error = called(name).exception
    assert isinstance(error, ConfigError)
    assert "no history of" in str(error)


def test_a_file_that_is_no_history_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.sqlite").write_bytes(b"no database" * 100)
    assert "not a history" in str(called(tmp_path / "a.sqlite").exception)


def test_a_folder_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    error = called(history(tmp_path / "gpt.sqlite"), "--output", tmp_path / "no" / "r.html").exception
    assert isinstance(error, ConfigError)
    assert "cannot be written" in str(error)
