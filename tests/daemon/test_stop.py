"""The action `stop`: the real daemon makes simulated ranks leave at one step, all of them or none."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sentinel import wire
from sentinel.actions.rollback import WAITS
from sentinel.errors import EXIT_BY_RULE
from tests.daemon.simulated import SimulatedRank, daemon_process, ended

pytestmark = pytest.mark.processes

RULES = """
group: mine
signals: {odd: what the run says of itself}
rules:
  - {alert: TooHigh, expr: loss > 100, actions: [rollback, stop], annotations: {summary: "loss {loss:.0f}"}}
  - {alert: Higher, expr: loss > 200, actions: [stop], annotations: {summary: "loss {loss:.0f}"}}
  - {alert: Highest, expr: loss > 300, actions: [rollback], annotations: {summary: "loss {loss:.0f}"}}
  - {alert: Low, expr: loss < 1, annotations: {summary: "loss {loss:.1f}"}}
  - {alert: Lowest, expr: loss < 0, severity: critical, downgrade: {when: odd > 0, severity: info}}
"""
REASON = "TooHigh: loss 101"
TERMS = wire.RollbackTerms(every=50, keep=4, margin=20, budget=1)


class Stoppable(SimulatedRank):
    """A rank that can leave at an agreed step."""

    def greet(self, **fields: Any) -> wire.Welcome:
        facts: dict[str, Any] = {"version": "test", "identity": self.identity, "takes_stop": True, **fields}
        self.say(wire.Hello(**facts))
        return self.expect(wire.Welcome)

    def train(self, first: int, *losses: float) -> None:
        self.steps(first, list(losses), step_seconds=[0.1] * len(losses))

    def promise(self) -> wire.Prepare:
        prepare = self.expect(wire.Prepare)
        self.say(wire.Prepared(id=prepare.id, ok=True, seq=prepare.at - 1))
        return prepare

    def answer(self, prepare: wire.Prepare, *, ok: bool = True, reason: str = "") -> None:
        """Report the result of a commit."""
        self.say(wire.RolledBack(id=prepare.id, ok=ok, to=-1, at=prepare.at, seconds=0.0, reason=reason))

    def done(self, alert: str = "TooHigh") -> list[str]:
        """Return what was done about the newest case of an alert; an empty list if it has not fired."""
        cases = [case for case in self.ask("incidents") if case["alert"] == alert]
        return max(cases, key=lambda case: int(case["id"].rpartition(".")[2]))["done"] if cases else []

    def await_done(self, words: str, alert: str = "TooHigh") -> None:
        """Wait until the last entry of the case contains these words."""
        deadline = time.monotonic() + 60
        while not (done := self.done(alert)) or words not in done[-1]:
            assert time.monotonic() < deadline, done
            time.sleep(0.02)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    rules = tmp_path / "mine.yaml"
    rules.write_text(RULES)
    with daemon_process("--rules", str(rules)) as made:
        yield made


@contextlib.contextmanager
def make_ranks(path: Path, world: int = 2) -> Iterator[list[Stoppable]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Stoppable(path, number, world)) for number in range(world)]


def test_all_ranks_leave_at_one_step_and_then_nothing_else_is_done(daemon: tuple[Path, Any]) -> None:
    path, process = daemon
    with make_ranks(path) as ranks:
        for rank in ranks:
            rank.greet(step_offset=1000)
        for rank in ranks:
            rank.train(0, 3.0, 101.0)
        prepares = [rank.promise() for rank in ranks]
        assert prepares[0] == prepares[1]
        assert (prepares[0].stops, prepares[0].to) == (True, -1)
        commits = [rank.expect(wire.Commit) for rank in ranks]
        assert [commit.reason for commit in commits] == [REASON] * 2
        assert ranks[0].done()[-1] == f"stopping all ranks at step {prepares[0].at + 1000}"
        for rank in ranks:
            rank.answer(prepares[0])
        told = f"stopped: all ranks ended training at the exit of step {prepares[0].at + 1000}"
        ranks[0].await_done(told)
        for rank in ranks:  # steps that were trained before all ranks had left
            rank.train(2, 301.0)
        ranks[0].await_done(f"nothing: all ranks have ended training, by {REASON}", "Higher")
        for rank in ranks:
            rank.say(wire.Goodbye(reason="stopped", detail=REASON, status=EXIT_BY_RULE))
        assert ended(process) == 0


def test_a_rank_that_is_past_the_step_is_asked_for_a_later_one(daemon: tuple[Path, Any]) -> None:
    with make_ranks(daemon[0]) as ranks:
        for rank in ranks:
            rank.greet()
        for rank in ranks:
            rank.train(0, 3.0, 101.0)
        first = ranks[0].promise()
        late = ranks[1].expect(wire.Prepare)
        assert ranks[0].done()[-1] == "stopping all ranks", "no step is named before all ranks agreed to it"
        ranks[1].say(wire.Prepared(id=late.id, ok=False, seq=late.at + 5))
        assert [rank.expect(wire.Abort).id for rank in ranks] == [first.id] * 2
        again = [rank.promise() for rank in ranks]
        assert again[0].at > late.at + 5
        assert again[0].stops
        assert {rank.expect(wire.Commit).id for rank in ranks} == {again[0].id}
        assert ranks[0].done()[-1] == f"stopping all ranks at step {again[0].at}"


def test_a_rank_that_dies_before_the_commit_ends_it_for_all(daemon: tuple[Path, Any]) -> None:
    with make_ranks(daemon[0]) as ranks:
        for rank in ranks:
            rank.greet()
        for rank in ranks:
            rank.train(0, 3.0, 101.0)
        ranks[0].promise()
        ranks[1].__exit__()
        assert "rank 1" in ranks[0].expect(wire.Abort).reason
        ranks[0].await_done("not stopped: rank 1 left in the middle of it")


def test_ranks_that_did_not_all_come_are_asked_again_and_not_without_end(daemon: tuple[Path, Any]) -> None:
    with make_ranks(daemon[0]) as ranks:
        for rank in ranks:
            rank.greet()
        for rank in ranks:
            rank.train(0, 3.0, 101.0)
        for _ in range(3):
            for prepare, rank in [(rank.promise(), rank) for rank in ranks]:
                rank.expect(wire.Commit)
                rank.answer(prepare, ok=False, reason="rank 1 got no verdict")
        ranks[0].await_done("not stopped: rank 1 got no verdict")
        assert "TooHigh: not stopped: rank 1 got no verdict" in _await_notice(ranks[0], "not stopped")


def test_a_rank_that_cannot_leave_keeps_all_of_them(daemon: tuple[Path, Any]) -> None:
    """The rank's optimizer steps inside the backward pass, or the rank is older and would misread the order."""
    with make_ranks(daemon[0]) as ranks:
        ranks[0].greet()
        ranks[1].greet(takes_stop=False, version="0.1")
        for rank in ranks:
            rank.train(0, 3.0, 101.0)
        ranks[0].await_done("not stopped: rank 1 cannot leave at an agreed step: its optimizer steps inside")
        assert "training-sentinel (0.1) is older" in ranks[0].done()[-1]


@pytest.mark.slow
def test_ranks_of_one_node_do_not_leave_alone(daemon: tuple[Path, Any]) -> None:
    with Stoppable(daemon[0], 0, 2) as rank:
        rank.identity = msgspec.structs.replace(rank.identity, local_world_size=1)
        rank.greet()
        rank.train(0, 3.0, 101.0)
        rank.await_done("stopping: waits while the nodes of this job do not meet (docs/cluster.md)")


def test_what_was_committed_is_known_to_the_next_daemon(tmp_path: Path) -> None:
    rules = tmp_path / "mine.yaml"
    rules.write_text(RULES)
    with daemon_process("--rules", str(rules)) as (path, process), Stoppable(path) as rank:
        rank.greet()
        rank.train(0, 3.0, 101.0)
        prepare = rank.promise()
        rank.expect(wire.Commit)
        process.kill()
        process.wait()
    with daemon_process("--rules", str(rules)) as (path, process), Stoppable(path) as rank:
        rank.greet(next_seq=2, promise=prepare.id)
        assert rank.expect(wire.Commit) == wire.Commit(id=prepare.id, reason=REASON)
        rank.answer(prepare)
        rank.await_done("stopped: all ranks ended training")


@pytest.mark.slow
def test_what_was_only_promised_is_asked_again_by_the_next_daemon(tmp_path: Path) -> None:
    rules = tmp_path / "mine.yaml"
    rules.write_text(RULES)
    with daemon_process("--rules", str(rules)) as (path, process), Stoppable(path) as rank:
        rank.greet()
        rank.train(0, 3.0, 101.0)
        first = rank.expect(wire.Prepare)
        process.kill()
        process.wait()
    with daemon_process("--rules", str(rules)) as (path, process), Stoppable(path) as rank:
        rank.greet(next_seq=2, promise=first.id)
        assert rank.expect(wire.Abort).id == first.id
        again = rank.promise()
        assert again.stops
        assert rank.expect(wire.Commit).reason == REASON


# Together with a rollback.


def train_with_snapshots(rank: Stoppable, **facts: Any) -> None:
    rank.greet(rollback=TERMS, **facts)
    for start in range(0, 250, 50):
        rank.train(start, *[3.0] * 50)
        rank.say(wire.SnapshotTaken(seq=start, nbytes=1, seconds=0.1, time=0.0))


def test_a_rollback_that_is_possible_comes_first_and_the_stop_where_its_budget_is_spent(
    daemon: tuple[Path, Any],
) -> None:
    with Stoppable(daemon[0]) as rank:
        train_with_snapshots(rank)
        rank.train(250, 101.0)
        back = rank.promise()
        assert (back.to, back.stops) == (200, False)
        assert rank.expect(wire.Commit).reason == ""
        rank.say(wire.RolledBack(id=back.id, ok=True, to=200, at=back.at, seconds=0.1))
        rank.await_done("rolled back to step 200")
        rank.train(back.at + 1, *[3.0] * 20, 101.0)
        stop = rank.promise()
        assert stop.stops
        rank.expect(wire.Commit)
        rank.answer(stop)
        rank.await_done("stopped: all ranks")
        assert "not rolled back: TooHigh again after 1 rollback(s), which is the budget" in rank.done()[-2]


@pytest.mark.slow
def test_a_rollback_that_fails_is_followed_by_the_stop(daemon: tuple[Path, Any]) -> None:
    with Stoppable(daemon[0]) as rank:
        train_with_snapshots(rank)
        rank.train(250, 101.0)
        back = rank.expect(wire.Prepare)
        rank.say(wire.Prepared(id=back.id, ok=False, seq=250, reason="not now"))
        stop = rank.promise()
        assert stop.stops
        assert rank.expect(wire.Commit).id == stop.id


def test_a_rollback_waits_for_a_stop_that_is_under_way(daemon: tuple[Path, Any]) -> None:
    """The rollback is made if the stop fails, but not if all ranks have left."""
    with Stoppable(daemon[0]) as rank:
        rank.greet(rollback=TERMS)  # there is no snapshot yet, so the run is stopped
        rank.train(0, 101.0)
        stop = rank.promise()
        rank.train(1, 301.0)
        rank.await_done(WAITS, "Highest")
        rank.expect(wire.Commit)
        rank.answer(stop)
        rank.await_done("nothing: all ranks have ended training", "Highest")
        rank.await_done("nothing: all ranks have ended training", "Higher")


# attach(stop_on=...)


def _await_notice(rank: SimulatedRank, words: str) -> str:
    while words not in (text := rank.expect(wire.Notice).text):
        pass
    return text


def test_an_alert_that_the_user_named_stops_the_run_and_an_unknown_name_is_reported(
    daemon: tuple[Path, Any],
) -> None:
    with Stoppable(daemon[0]) as rank:
        assert rank.greet(stop_on=("Low", "Lowst")).heeds_stop_on
        said = _await_notice(rank, "stop_on")
        assert "attach(stop_on=...): there is no alert 'Lowst'; did you mean 'Lowest'?" in said
        rank.train(0, 3.0, 0.5)
        prepare = rank.promise()
        assert prepare.stops
        assert rank.expect(wire.Commit).reason == "Low: loss 0.5"


def test_a_named_alert_stops_the_run_even_where_its_rule_is_downgraded(daemon: tuple[Path, Any]) -> None:
    with Stoppable(daemon[0]) as rank:
        rank.greet(stop_on=("Lowest",))
        rank.steps(0, [-1.0], odd=[1.0])
        assert rank.expect(wire.Prepare).stops
        assert next(case["severity"] for case in rank.ask("incidents") if case["alert"] == "Lowest") == "info"


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_without_stop_on_the_same_alert_stops_nothing(number: int, daemon: tuple[Path, Any]) -> None:
    """The alert stops neither another run on the same daemon nor the next start of a script without `stop_on`.

    The first rank of a node reports `stop_on`, which is rank 1 on the second of two nodes.
    """
    with Stoppable(daemon[0], number, 1 + number) as rank:
        rank.identity = msgspec.structs.replace(rank.identity, local_world_size=1)
        rank.greet(stop_on=("Low",))
        rank.train(0, 3.0)
    with Stoppable(daemon[0], number, 1 + number, session="another") as rank:
        rank.identity = msgspec.structs.replace(rank.identity, local_world_size=1, attempt=1)
        rank.greet()
        rank.train(0, 3.0, 0.5)
        while not any(case["alert"] == "Low" for case in rank.ask("incidents")):
            time.sleep(0.02)
        assert rank.done("Low") == []
