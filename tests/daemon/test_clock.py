"""The node's clock is set while a run is watched.

Durations of windows, `for` and `keep_firing` stay the same, and messages show the clock that users have.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest

from sentinel import wire
from sentinel.daemon.run import clock as clock_module
from sentinel.daemon.run.clock import Clock
from sentinel.diagnose.case import Case
from sentinel.engine import Entity, Observation, Rule
from sentinel.engine.rules.loading import load_rules
from sentinel.runs import Run
from sentinel.store import History, Store
from tests.run_parts import watch_run

HOUR = 3600.0


def rule(alert: str, expr: str, *more: str) -> list[Rule]:
    lines = [f"- alert: {alert}", f"  expr: {expr}", *(f"  {one}" for one in more), "  annotations: {summary: x}"]
    text = "\n".join(["group: clocks", "signals: {level: what the run logs}", "rules:", *(f"  {one}" for one in lines)])
    return [item for item in load_rules(text, "clocks.yaml").rules]


HIGH = rule("High", "level > 5", "for: 60s", "keep_firing: 60s")
RISEN = rule("Risen", "delta(level, 5m) > 3")


class Node:
    """A node with a clock that can be set, and a run on it that reports a step every 10 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rules: list[Rule] = HIGH, store: Store | None = None) -> None:
        self.wall, self.monotonic = 1_800_000_000.0, 5000.0
        monkeypatch.setattr(
            clock_module, "time", SimpleNamespace(time=lambda: self.wall, monotonic=lambda: self.monotonic)
        )
        run = Run("train", "r1", 0.0)
        self.watch = watch_run(run, rules, store)
        identity = wire.Identity(run="train", run_id="r1", rank=0, world_size=1, session="s")
        self.rank = self.watch.ingest.hello(wire.Hello(version="t", identity=identity), self.monotonic)
        self.seq = 0

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds

    def step(self, level: float, *, stamp: float | None = None) -> None:
        self.passes(10.0)
        self.report(level, self.wall if stamp is None else stamp)

    def report(self, level: float, stamp: float) -> None:
        columns = {"level": wire.Column(array("d", [level]).tobytes())}
        batch = wire.Batch(seqs=array("q", [self.seq]).tobytes(), times=array("d", [stamp]).tobytes(), columns=columns)
        self.watch.ingest.message(self.rank, batch, self.monotonic)
        self.seq += 1

    @property
    def case(self) -> Case | None:
        return next(iter(self.watch.incidents.log.cases.values()), None)


@pytest.mark.parametrize("leap", [0.0, -3 * HOUR, 3 * HOUR])
def test_durations_stay_the_same_when_the_clock_is_set(monkeypatch: pytest.MonkeyPatch, leap: float) -> None:
    node = Node(monkeypatch)
    for _ in range(3):
        node.step(1.0)
    node.step(9.0)
    node.step(9.0)
    node.wall += leap
    for _ in range(4):
        node.step(9.0)
        assert node.case is None, "it has held for less than 60 s"
    node.step(9.0)
    assert node.case is not None
    assert node.case.time == pytest.approx(node.wall), "people are shown the clock that they have"
    node.step(1.0)
    node.wall -= leap
    for _ in range(4):
        node.step(1.0)
        assert node.case.state == "firing"
    node.step(1.0)
    assert node.case.state == "resolved"
    assert node.case.resolved_time == pytest.approx(node.wall)


@pytest.mark.parametrize("leap", [-3 * HOUR, 3 * HOUR])
def test_a_step_that_was_stamped_before_the_clock_was_set_and_comes_after_it(
    monkeypatch: pytest.MonkeyPatch, leap: float
) -> None:
    node = Node(monkeypatch)
    node.step(9.0)
    before = node.wall + 5.0
    node.wall += leap
    node.step(9.0, stamp=before)
    for _ in range(4):
        node.step(9.0)
        assert node.case is None
    node.step(9.0)
    assert node.case is not None


def test_a_window_in_time_slides_on_after_the_clock_was_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, RISEN)
    for _ in range(31):
        node.step(1.0)
    node.wall -= 3 * HOUR
    node.step(9.0)
    assert node.case is not None
    for _ in range(28):
        node.step(9.0)
    assert node.case.state == "firing"
    node.step(9.0)
    assert node.case.state == "resolved", "five minutes ago it was as high"


def test_another_daemon_goes_on_with_the_rules_time(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch)
    node.step(1.0)
    node.wall += HOUR
    node.step(1.0)
    saved = node.watch.incidents.clock.save_state()
    node.wall += 2 * HOUR
    successor = Clock(node.watch.run.attempt, saved)
    successor.look()
    assert node.watch.run.attempt.clock_shift == pytest.approx(3 * HOUR)


def test_devices_are_kept_though_the_clock_was_set_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = Store(tmp_path / "h.sqlite", run="train", run_id="r1")
    node = Node(monkeypatch, store=store)
    node.step(1.0)
    for _ in range(3):
        measured = Observation(0, node.wall, {Entity("node", "n"): {"host_cpu_ratio": 0.5}})
        node.watch.ingest.observe_machine(node.watch.run.attempt.devices, measured, (), node.monotonic)
        node.passes(60.0)
        node.wall -= 3 * HOUR
    store.close()
    with History(tmp_path / "h.sqlite") as history:
        assert len(history.readings(["host_cpu_ratio"], "node n")["host_cpu_ratio"].values) == 3
