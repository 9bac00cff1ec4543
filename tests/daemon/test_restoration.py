"""Another daemon goes on with a run, with other rules or of another version: the state of the rules does not fit.

Steps are judged again. What was measured between them cannot be, and no incident about that may end because of it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from sentinel import wire
from sentinel.daemon import restoration
from sentinel.daemon.run import saved_state
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.engine import Entity, Observation, Rule
from sentinel.rulebook.loader import stock_rules
from sentinel.runs import Run
from sentinel.store import Store
from tests.run_parts import watch_run

HEALTHY = {"gpu_lost": 0.0, "gpu_xid": 0.0, "gpu_silent_seconds": 0.0}
FAULTY = {**HEALTHY, "gpu_xid": 79.0}
STEPS = 20
Change = Callable[[], tuple[Rule, ...]]
"""Makes the stored state of rules not fit, and returns the rules of the next daemon."""
KEPT_SECONDS = 600.0
"""`keep_firing` of GpuFault."""


def hello(watch: WatchedRun) -> wire.Hello:
    identity = wire.Identity(run="train", run_id="r1", session="s")
    return wire.Hello(version="t", identity=identity, next_seq=watch.run.attempt.closed_to + 1, step_offset=1000)


def begin(path: Path, rules: tuple[Rule, ...]) -> WatchedRun:
    watch = watch_run(Run("train", "r1", 0.0), rules, Store(path, run="train", run_id="r1"))
    rank = watch.ingest.hello(hello(watch), 0.0)
    batch = wire.Batch(
        seqs=array("q", range(STEPS)).tobytes(),
        times=array("d", [1e9 + seq for seq in range(STEPS)]).tobytes(),
        columns={"loss": wire.Column(array("d", [1.0] * STEPS).tobytes())},
    )
    watch.ingest.message(rank, batch, 1.0)
    return watch


def take_over(former: WatchedRun, change: Change) -> WatchedRun:
    """Return the run as the next daemon watches it, after the former one was killed, and then something changed."""
    former.incidents.preserve()
    assert former.store is not None
    former.store.close()
    rules = change()
    store = Store(former.store.path, run="train", run_id="r1")
    watch = watch_run(Run("train", "r1", 0.0), rules, store)
    untold = restoration.resume(watch, store.path, hello(former), 0.0)
    watch.ingest.hello(hello(former), 0.0)
    watch.incidents.apply(untold, 0.0)
    return watch


def read_gpus(watch: WatchedRun, *gpus: Mapping[str, float], after: float = 0.0) -> None:
    """Have the rules judge a reading of GPUs, `after` seconds from now."""
    values = {Entity("gpu", str(index)): read for index, read in enumerate(gpus)}
    watch.incidents.observe_between(Observation(watch.run.attempt.closed_to, time.time() + after, values), 0.0)


def cases(watch: WatchedRun) -> list[tuple[str, str, str]]:
    return [(case.id, case.alert, case.state) for case in watch.incidents.log.cases.values()]


def another_rule(monkeypatch: pytest.MonkeyPatch) -> tuple[Rule, ...]:
    return tuple(rule for rule in stock_rules() if rule.name != "Divergence")


def another_version(monkeypatch: pytest.MonkeyPatch) -> tuple[Rule, ...]:
    monkeypatch.setattr(saved_state, "__version__", "999")
    return stock_rules()


@pytest.fixture(params=[another_rule, another_version], ids=lambda change: change.__name__)
def changed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Change:
    return lambda: request.param(monkeypatch)


def test_the_last_steps_are_known_to_the_next_daemon(tmp_path: Path, changed: Change) -> None:
    """Evidence of what it finds in the first steps reaches back to before it began."""
    former = begin(tmp_path / "r1.sqlite", stock_rules())
    recent = [(step.seq, step.run["loss"]) for step in former.run.attempt.recent]
    assert recent
    watch = take_over(former, changed)
    assert [(step.seq, step.run["loss"]) for step in watch.run.attempt.recent] == recent


def test_a_fault_in_one_reading_stays_open_for_as_long_as_its_rule_says(tmp_path: Path, changed: Change) -> None:
    former = begin(tmp_path / "r1.sqlite", stock_rules())
    read_gpus(former, FAULTY)
    assert cases(former) == [("0.1", "GpuFault", "firing")]
    watch = take_over(former, changed)
    for after in (0.0, 4.0, KEPT_SECONDS - 60.0):
        read_gpus(watch, HEALTHY, after=after)
        assert cases(watch) == [("0.1", "GpuFault", "firing")]
    read_gpus(watch, HEALTHY, after=KEPT_SECONDS + 60.0)
    (case,) = watch.incidents.log.cases.values()
    assert (case.state, case.resolved_step, case.done) == ("resolved", 1000 + STEPS - 1, ())


def test_a_fault_that_comes_back_is_the_same_incident(tmp_path: Path, changed: Change) -> None:
    former = begin(tmp_path / "r1.sqlite", stock_rules())
    read_gpus(former, FAULTY)
    watch = take_over(former, changed)
    read_gpus(watch, HEALTHY)
    read_gpus(watch, FAULTY, after=4.0)
    assert cases(watch) == [("0.1", "GpuFault", "firing")]
    read_gpus(watch, HEALTHY, after=KEPT_SECONDS + 60.0)
    assert cases(watch) == [("0.1", "GpuFault", "resolved")]
    read_gpus(watch, FAULTY, after=KEPT_SECONDS + 64.0)
    assert [identity for identity, *_ in cases(watch)] == ["0.1", "0.3"], "a number is not given twice"


def test_it_ends_only_once_all_its_members_have_been_judged(tmp_path: Path, changed: Change) -> None:
    former = begin(tmp_path / "r1.sqlite", stock_rules())
    read_gpus(former, FAULTY, FAULTY)
    watch = take_over(former, changed)
    read_gpus(watch, HEALTHY, after=KEPT_SECONDS + 60.0)
    assert cases(watch) == [("0.1", "GpuFault", "firing")]
    read_gpus(watch, HEALTHY, HEALTHY, after=KEPT_SECONDS + 64.0)
    assert cases(watch) == [("0.1", "GpuFault", "resolved")]


def test_a_daemon_that_was_killed_before_its_rule_judged_leaves_it_to_the_next(tmp_path: Path, changed: Change) -> None:
    former = begin(tmp_path / "r1.sqlite", stock_rules())
    read_gpus(former, FAULTY)
    second = take_over(former, changed)
    watch = take_over(second, lambda: tuple(second.incidents.rules))
    read_gpus(watch, FAULTY)
    assert cases(watch) == [("0.1", "GpuFault", "firing")]
    read_gpus(watch, HEALTHY, after=KEPT_SECONDS + 60.0)
    assert cases(watch) == [("0.1", "GpuFault", "resolved")]


def test_it_ends_with_its_rule(tmp_path: Path) -> None:
    former = begin(tmp_path / "r1.sqlite", stock_rules())
    read_gpus(former, FAULTY)
    others = tuple(rule for rule in stock_rules() if rule.name != "GpuFault")
    assert cases(take_over(former, lambda: others)) == [("0.1", "GpuFault", "resolved")]


def test_it_ends_when_its_rule_is_taken_away_by_a_reload(tmp_path: Path, changed: Change) -> None:
    former = begin(tmp_path / "r1.sqlite", stock_rules())
    read_gpus(former, FAULTY)
    watch = take_over(former, changed)
    watch.incidents.replace_rules([rule for rule in stock_rules() if rule.name != "GpuFault"], 0.0)
    (case,) = watch.incidents.log.cases.values()
    assert (case.state, case.done) == ("resolved", ("over: its rule was changed or taken away",))
