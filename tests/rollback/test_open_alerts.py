"""Only alerts that may roll back keep snapshots from being taken; and the age of the newest snapshot."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sentinel import wire
from sentinel.cli.status import describe_rollback
from sentinel.cli.top_frame import Traces, frame
from sentinel.daemon.frontend import views
from sentinel.engine import Rule
from sentinel.engine.rules.loading import load_rules
from sentinel.hooks.rollback.options import Rollback
from sentinel.hooks.snapshot.directory import steps
from sentinel.report.live import LiveRun
from sentinel.report.live_page import fragment
from sentinel.runs import Run
from tests.rollback.training import Training, batches, of_type
from tests.run_parts import watch_run
from tests.stock import RULES
from tests.waiting import until

ROLLING_BACK = sorted(name for name, rule in RULES.items() if "rollback" in rule.actions)
OTHERS = sorted(RULES.keys() - ROLLING_BACK)
DATA = batches(80)


def held_open(name: str, condition: str = "loss > -1", hold: str = "1 step") -> Rule:
    """Return an alert with the name, severity and actions of a stock rule, and another condition."""
    stock = RULES[name]
    text = f"""
group: test
rules:
  - alert: {name}
    expr: {condition}
    for: {hold}
    severity: {stock.severity}
    actions: [{", ".join(stock.actions)}]
"""
    return load_rules(text, "open.yaml").rules[0]


class Watched:
    """A training and the daemon's view of it: a restorer and a run, connected only by their messages."""

    def __init__(self, rules: Iterable[Rule], terms: Rollback) -> None:
        run = Run("train", "r1", 0.0)
        self.training = Training()
        self.sent: list[wire.FromRank] = []
        self.late = False
        """Whether the daemon's message that withholds snapshots has not arrived yet."""
        self.watch = watch_run(run, tuple(rules), link=self)
        identity = wire.Identity(run="train", run_id="r1", session="s")
        self.rank = self.watch.ingest.hello(wire.Hello(version="t", identity=identity, rollback=terms.terms()), 0.0)
        self.restorer, self.said = self.training.arm(terms)

    def send(self, rank: int, message: wire.Message) -> None:
        if not (self.late and isinstance(message, wire.Withhold)):
            self.restorer.receive(message)

    def interrupt(self, process: int, signal: int) -> bool:
        return False

    def train(self, count: int, loss: float | None = None) -> None:
        """Train for `count` steps; `loss` is reported in place of the true loss."""
        for batch in DATA[self.training.seq : self.training.seq + count]:
            seq = self.training.seq
            self.training.step(batch)
            if (disk := self.restorer.disk) is not None and disk.written is not None:
                disk.written.wait()  # so that its answer does not come in the middle of another message
            while self.said:
                self.sent.append(message := self.said.pop(0))
                self.watch.ingest.message(self.rank, message, 0.0)
            self.watch.ingest.message(self.rank, _batch(seq, self.training.losses[-1] if loss is None else loss), 0.0)

    def told(self) -> dict[str, Any]:
        """Return what the daemon's status says of the run after a tick."""
        self.watch.tick(1.0)
        [run] = views.status([self.watch])["runs"]
        return cast(dict[str, Any], run)

    @property
    def open(self) -> set[str]:
        return {case.alert for case in self.watch.incidents.log.cases.values() if case.state == "firing"}

    @property
    def taken(self) -> list[int]:
        return [message.seq for message in of_type(self.sent, wire.SnapshotTaken)]


def _batch(seq: int, loss: float) -> wire.Batch:
    values = {"loss": loss, "step_seconds": 0.5}
    return wire.Batch(
        seqs=array("q", [seq]).tobytes(),
        times=array("d", [1e9 + seq]).tobytes(),
        columns={name: wire.Column(array("d", [value]).tobytes()) for name, value in values.items()},
    )


@pytest.mark.slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", OTHERS)
def test_an_open_alert_that_does_not_roll_back_keeps_no_snapshot_away(name: str, tmp_path: Path) -> None:
    terms = Rollback(every=10, keep=2, margin=5, directory=tmp_path / "disk", disk_every=1, disk_keep=9)
    watched = Watched([held_open(name)], terms)
    watched.train(62)
    watched.restorer.close()
    assert watched.open == {name}
    assert watched.taken == [0, 10, 20, 30, 40, 50, 60]
    assert steps(tmp_path / "disk") == [0, 10, 20, 30, 40, 50]


@pytest.mark.parametrize("name", ROLLING_BACK)
def test_an_alert_that_may_roll_back_withholds_snapshots_while_it_is_pending(name: str) -> None:
    watched = Watched([held_open(name, "loss > 5", hold="60 steps")], Rollback(every=10, keep=2, margin=5))
    watched.train(23)
    watched.train(14, loss=9.0)
    assert watched.watch.run.attempt.withheld_by == (name,)
    watched.train(26)
    assert watched.taken == [0, 10, 20, 40, 50, 60]
    assert watched.watch.run.attempt.withheld_by == ()


def test_an_alert_that_fires_and_could_not_roll_back_withholds_snapshots() -> None:
    watched = Watched([held_open("LossSpike", "loss > 5")], Rollback(every=10, keep=2, margin=5))
    watched.train(2)
    watched.train(22, loss=9.0)
    [case] = watched.watch.incidents.log.cases.values()
    assert case.done[0].startswith("not rolled back: no snapshot was followed by 5 healthy steps before the first sign")
    watched.train(20)
    assert watched.taken == [0, 30, 40]


def test_an_odd_loss_costs_no_snapshot_but_a_second_one_within_half_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single hard batch at a multiple of `every` used to bring SnapshotStale near."""
    clock = SimpleNamespace(monotonic=lambda: now, time=time.time, perf_counter=time.perf_counter)
    monkeypatch.setattr("sentinel.hooks.rollback.restorer.time", clock)
    now = 100.0
    watched = Watched([], Rollback(every=2, keep=9, margin=5))
    watched.train(4)
    now += 1.0
    watched.restorer.suspect()
    watched.train(6)
    assert watched.taken == [0, 2, 4]
    now += 0.6
    watched.train(2)
    assert watched.taken == [0, 2, 4, 10]


def test_what_was_taken_in_trouble_or_just_before_is_not_good(tmp_path: Path) -> None:
    """Such a snapshot is neither restored nor written to disk, even after the trouble has passed without a rollback."""
    terms = Rollback(every=10, keep=3, margin=5, directory=tmp_path / "disk", disk_every=1, disk_keep=9)
    watched = Watched([held_open("Divergence", "loss > 5")], terms)
    watched.late = True
    watched.train(2)
    watched.train(22, loss=9.0)
    watched.train(10)
    watched.restorer.close()
    assert watched.taken == [0, 10, 20, 30]
    assert watched.watch.run.attempt.held == {10, 20, 30}
    good = watched.watch.actions.rollback.list_good
    assert (good(34), good(35)) == (set(), {30})
    assert steps(tmp_path / "disk") == []


def shown(watched: Watched) -> dict[str, str]:
    """Return what a person reads in `status`, in `top` and on the page."""
    run = watched.told()
    live = LiveRun(watched.watch.run, [], []).make_report()
    return {
        "status": "\n".join(describe_rollback(run["rollback"])),
        "top": "\n".join(line.text for line in frame([run], [], Traces(), 120, 40)),
        "page": fragment(live, run),
    }


def test_status_top_and_page_show_the_newest_good_snapshot_and_its_age() -> None:
    watched = Watched([held_open("LossSpike", "loss > 5", hold="60 steps")], Rollback(every=10, keep=2, margin=5))
    watched.train(4)
    for place, text in shown(watched).items():
        assert "newest good snapshot: none in 3 steps" in text, place
    watched.train(28)
    for place, text in shown(watched).items():
        assert "newest good snapshot: step 20, 11 steps ago" in text, place
        assert "none is taken" not in text, place
    watched.train(14, loss=9.0)
    for place, text in shown(watched).items():
        assert "newest good snapshot: step 20, 25 steps ago; none is taken because of LossSpike" in text, place


def test_without_an_armed_rollback_no_snapshots_are_mentioned() -> None:
    watched = Watched([RULES["SnapshotStale"]], Rollback(every=10, keep=2, margin=5))
    watched.rank.hello = wire.Hello(version="t", identity=watched.rank.identity)
    watched.train(40)
    assert not any("newest good" in text for text in shown(watched).values())
    [status] = watched.watch.incidents.evaluator.status()
    assert status.state == "no data"


@pytest.mark.slow
def test_a_newest_snapshot_older_than_three_times_every_is_an_alert_that_says_why() -> None:
    rules = [held_open("LossSpike", "loss > 5", hold="60 steps"), RULES["SnapshotStale"]]
    watched = Watched(rules, Rollback(every=10, keep=2, margin=5))
    watched.train(22)
    watched.train(19, loss=9.0)
    watched.told()
    assert watched.open == set()
    watched.train(1, loss=9.0)
    watched.told()
    assert watched.open == set()
    until(lambda: watched.told() and watched.open, "the alert, two seconds later")
    [case] = watched.watch.incidents.log.cases.values()
    assert (case.alert, case.severity, case.state) == ("SnapshotStale", "warning", "firing")
    assert case.diagnosis.cause.startswith("no snapshot is taken because of LossSpike")
    watched.train(26)
    watched.told()
    assert case.state == "resolved"


def test_a_margin_of_several_snapshots_is_not_stale() -> None:
    watched = Watched([RULES["SnapshotStale"]], Rollback(every=5, keep=5, margin=20))
    for _ in range(35):
        watched.train(2)
        watched.told()
    assert not watched.watch.incidents.log.cases
