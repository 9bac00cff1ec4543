"""An alert that comes and goes does not let a daemon's memory grow, and no case is lost."""

from __future__ import annotations

from array import array
from pathlib import Path

import msgspec
import pytest

from sentinel import wire
from sentinel.daemon import restoration
from sentinel.daemon.frontend import views
from sentinel.daemon.frontend.faults import FaultCounter
from sentinel.daemon.frontend.metrics import LiveCollector
from sentinel.daemon.run import incident_log
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.engine import Rule
from sentinel.engine.rules.loading import load_rules
from sentinel.rulebook.loader import Reloads
from sentinel.runs import Run
from sentinel.store import History, Store
from tests.run_parts import SentMessages, watch_run

TIMES = 9


def rules() -> list[Rule]:
    lines = [
        "group: t",
        "rules:",
        "  - {alert: Flapping, expr: loss > 5, severity: warning}",
        "  - {alert: First, expr: first(loss) > 5, severity: critical}",
    ]
    return list(load_rules("\n".join(lines), "t.yaml").rules)


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WatchedRun:
    """A run in which First fires at the first step and stays open, and Flapping fires and resolves `TIMES` times."""
    monkeypatch.setattr(incident_log, "CASES", 4)
    run = Run("train", "r1", 0.0)
    watch = watch_run(run, rules(), Store(tmp_path / "r1.sqlite", run="train", run_id="r1"))
    identity = wire.Identity(run="train", run_id="r1", rank=0, world_size=1, session="s")
    rank = watch.ingest.hello(wire.Hello(version="t", identity=identity), 0.0)
    losses = [9.0, 1.0] * TIMES
    watch.ingest.message(
        rank,
        wire.Batch(
            seqs=array("q", range(len(losses))).tobytes(),
            times=array("d", [1e9 + seq for seq in range(len(losses))]).tobytes(),
            columns={"loss": wire.Column(array("d", losses).tobytes())},
        ),
        1.0,
    )
    watch.incidents.preserve()
    return watch


def test_ranks_are_asked_for_what_the_rule_names() -> None:
    """Evidence that a rule names is asked for whatever the rule is called, and without any action."""
    text = (
        "group: t\nrules: [{alert: Mine, expr: loss > 5, evidence: [moments, census]}, {alert: Other, expr: loss > 5}]"
    )
    run, link = Run("train", "r1", 0.0), SentMessages()
    watch = watch_run(run, load_rules(text, "t").rules, link=link)
    identity = wire.Identity(run="train", run_id="r1", rank=0, world_size=1, session="s")
    rank = watch.ingest.hello(wire.Hello(version="t", identity=identity), 0.0)
    seqs, times = array("q", [0]).tobytes(), array("d", [1e9]).tobytes()
    columns = {"loss": wire.Column(array("d", [9.0]).tobytes())}
    watch.ingest.message(rank, wire.Batch(seqs=seqs, times=times, columns=columns), 1.0)
    assert [message.what for message in link.messages if isinstance(message, wire.Ask)] == ["moments", "census"]


def at_hand(watch: WatchedRun) -> list[tuple[str, str, int]]:
    return [(case.alert, case.state, case.step) for case in watch.incidents.log.cases.values()]


def test_open_and_newest_incidents_stay_in_memory(watch: WatchedRun) -> None:
    newest = [("Flapping", "resolved", step) for step in (12, 14, 16)]
    assert at_hand(watch) == [("First", "firing", 0), *newest]


def test_a_new_attempt_ends_what_is_open_and_leaves_what_had_ended_as_it_was(watch: WatchedRun) -> None:
    again = msgspec.structs.replace(watch.run.attempt.ranks[0].identity, session="another")
    watch.ingest.hello(wire.Hello(version="t", identity=again), 2.0)
    ended = [(case.alert, case.state, case.done) for case in watch.incidents.log.cases.values()]
    assert ended == [("First", "resolved", ("over: attempt 1 began",)), *[("Flapping", "resolved", ())] * 3]


def test_all_incidents_are_counted_and_in_the_history(watch: WatchedRun) -> None:
    assert watch.store is not None
    with History(watch.store.path) as history:
        kept = [case["alert"] for case in history.incidents()]
    assert sorted(kept) == ["First", *["Flapping"] * TIMES]
    (status,) = views.status([watch])["runs"]
    assert (status["incidents"], status["open_incidents"]) == (TIMES + 1, 1)
    found = {
        (family.name, sample.labels["alert"]): sample.value
        for family in LiveCollector({"r1": watch}, Reloads(), FaultCounter()).collect()
        if family.name.startswith("sentinel_incidents")
        for sample in family.samples
        if "alert" in sample.labels
    }
    assert found == {
        ("sentinel_incidents", "First"): 1, ("sentinel_incidents", "Flapping"): TIMES,
        ("sentinel_incidents_firing", "First"): 1, ("sentinel_incidents_firing", "Flapping"): 0,
    }  # fmt: skip


def test_a_daemon_that_takes_over_holds_the_same_incidents(watch: WatchedRun) -> None:
    assert watch.store is not None
    path, run = watch.store.path, Run("train", "r1", 0.0)
    hello = wire.Hello(version="t", identity=watch.run.attempt.ranks[0].identity, next_seq=2 * TIMES)
    watch.store.close()
    other = watch_run(run, rules(), Store(path, run="train", run_id="r1"))
    restoration.resume(other, path, hello, 5.0)
    assert sorted(at_hand(other)) == sorted(at_hand(watch))
    assert other.incidents.log.fired == watch.incidents.log.fired
