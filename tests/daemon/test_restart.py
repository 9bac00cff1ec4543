"""A daemon is killed with -9 and another takes over: the same attempt and incidents, and no alert is sent twice."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from sentinel import wire
from sentinel.daemon.ingest.acknowledgements import FRAMES
from sentinel.node import paths
from sentinel.store import History
from tests.daemon.simulated import SimulatedRank, daemon_process
from tests.daemon.test_daemon import HEALTHY, TERMS, promised, sentinel, spiked

pytestmark = pytest.mark.processes


def kept(condition: Callable[[History], object]) -> None:
    """Wait until the history fulfils the condition."""
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(Exception), History(paths.histories()[0]) as history:
            if condition(history):
                return
        assert time.monotonic() < deadline, "not in the history"
        time.sleep(0.02)


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(60)


def notices(rank: SimulatedRank) -> list[str]:
    """Return the ids of the notices that have arrived so far: an unknown query is answered after them."""
    rank.say(wire.Query(what="nothing"))
    rank.expect(wire.Answer)
    found = [message.id for message in rank.arrived if isinstance(message, wire.Notice)]
    rank.arrived.clear()
    return found


def cases() -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(sentinel("incidents", "--json").stdout)
    return found


def test_an_open_incident_stays_one_and_ends_later() -> None:
    with daemon_process() as (path, process), SimulatedRank(path) as rank:
        rank.hello(step_offset=1000)
        rank.steps(0, HEALTHY[:20])
        rank.steps(20, [math.nan])
        fired = rank.expect(wire.Notice)
        assert fired.id == "r1/0.1/fired"
        kill(process)  # the rank has the notice, so the alert must be known
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        rank.hello(next_seq=21, step_offset=1000)
        assert notices(rank) == [fired.id], "told again under its id: the rank knows"
        (case,) = cases()
        assert (case["id"], case["state"], case["first_step"]) == ("0.1", "firing", 1020)
        rank.steps(21, [math.nan] * 5)
        assert notices(rank) == []
        rank.steps(26, HEALTHY[26:200])
        assert rank.expect(wire.Notice).id == "r1/0.1/resolved"
        rank.say(wire.Goodbye())
        rank.expect(wire.Kept)
    (case,) = cases()
    assert (case["id"], case["state"], case["attempt"]) == ("0.1", "resolved", 0)
    with History(paths.histories()[0]) as history:
        assert list(history.series("loss").seqs) == list(range(200))
        assert len(history.attempts()) == 1


@pytest.mark.slow
def test_what_happened_without_a_daemon_is_reported_once() -> None:
    """Steps that were not confirmed are sent again; those that were kept after all change nothing."""
    with daemon_process() as (path, process), SimulatedRank(path) as rank:
        rank.hello()
        rank.steps(0, HEALTHY[:20])
        kept(lambda history: history.last_seq(0) == 19)
        kill(process)
    with daemon_process() as (path, process), SimulatedRank(path) as rank:
        rank.hello(next_seq=10)
        rank.steps(10, HEALTHY[10:20])
        rank.steps(20, [math.nan, 1.0, math.nan])
        assert rank.expect(wire.Notice).id == "r1/0.1/fired"
        assert notices(rank) == []
        kill(process)
    with History(paths.histories()[0]) as history:
        assert list(history.series("loss").seqs)[:20] == list(range(20))


@pytest.mark.slow
def test_windows_of_rules_survive_a_restart() -> None:
    """A rule whose window began before the kill fires where it would have fired without it."""

    def of_the_run() -> list[dict[str, Any]]:
        rules = json.loads(sentinel("status", "--json").stdout)[0]["rules"]
        return [rule for rule in rules if rule["entity"][0] != "node"]  # the host is read again, some seconds later

    with daemon_process() as (path, process), SimulatedRank(path) as rank:
        rank.hello()
        rank.steps(0, HEALTHY[:250])
        kept(lambda history: history.last_seq(0) == 249)
        before = of_the_run()
        kill(process)
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        rank.hello(next_seq=250)
        assert of_the_run() == before
        rank.steps(250, [8.0, 8.5, 9.0])
        assert "LossSpike" in rank.expect(wire.Notice).text


@pytest.mark.slow
def test_changed_rules_judge_the_last_steps_again(tmp_path: object) -> None:
    rules = paths.runtime_root().parent / "own.yaml"
    rules.write_text("group: mine\nrules:\n  - alert: High\n    expr: loss > 100\n    keep_firing: 50 steps\n")
    with daemon_process("--rules", str(rules)) as (path, process), SimulatedRank(path) as rank:
        rank.hello()
        rank.steps(0, [1.0] * 20 + [101.0] * 5)
        assert rank.expect(wire.Notice).id == "r1/0.1/fired"
        rank.steps(25, [math.nan])
        assert rank.expect(wire.Notice).id == "r1/0.2/fired"
        kill(process)
    rules.write_text("group: mine\nrules:\n  - alert: High\n    expr: loss > 99\n    keep_firing: 50 steps\n")
    with daemon_process("--rules", str(rules)) as (path, _), SimulatedRank(path) as rank:
        rank.hello(next_seq=26)
        assert notices(rank) == ["r1/0.1/fired", "r1/0.2/fired"]
        assert [(case["id"], case["alert"], case["state"]) for case in cases()] == [
            ("0.1", "High", "firing"),
            ("0.2", "NonFiniteLoss", "firing"),
        ]
        rank.steps(26, [1.0] * 60)
        assert {rank.expect(wire.Notice).id for _ in range(2)} == {"r1/0.1/resolved", "r1/0.2/resolved"}


@pytest.mark.slow
def test_another_session_is_the_next_attempt_and_the_first_is_kept() -> None:
    for number, session in enumerate(("a", "b", "c")):
        with daemon_process() as (path, process), SimulatedRank(path, session=session) as rank:
            rank.hello()
            rank.steps(0, HEALTHY[: 10 + number])
            kept(lambda history, n=number: history.last_seq(n) == 9 + n)  # type: ignore[misc]
            kill(process)
    with History(paths.histories()[0]) as history:
        assert [number for number, *_ in history.attempts()] == [0, 1, 2]
        assert [len(history.series("loss", attempt=n).seqs) for n in range(3)] == [10, 11, 12]


def test_budget_and_rewound_steps_are_remembered() -> None:
    with daemon_process() as (path, process), SimulatedRank(path) as rank:
        commit = spiked(rank)
        rank.say(wire.RolledBack(id=commit.id, ok=True, to=200, at=260, seconds=0.1))
        rank.expect(wire.Notice)
        assert "rolled back" in rank.expect(wire.Notice).text
        kill(process)
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        rank.hello(rollback=TERMS, next_seq=254)
        (run,) = json.loads(sentinel("status", "--json").stdout)
        assert [outcome["to"] for outcome in run["rollback"]["done"]] == [200]
        rank.steps(254, [9.0] * 7, step_seconds=[0.1] * 7)  # of a state from before the restore, which no longer exists
        rank.steps(261, HEALTHY[200:260], step_seconds=[0.1] * 60)
        rank.steps(321, [9.0] * 5, step_seconds=[0.1] * 5)
        assert "after 1 rollback(s), which is the budget" in rank.expect(wire.Stop).reason


def test_a_verdict_that_was_given_is_given_again() -> None:
    with daemon_process() as (path, process), SimulatedRank(path) as rank:
        commit = spiked(rank)
        kill(process)
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        rank.say(wire.Hello(version="t", identity=rank.identity, rollback=TERMS, next_seq=254, promise=commit.id))
        assert rank.expect(wire.Commit).id == commit.id
        rank.say(wire.RolledBack(id=commit.id, ok=True, to=200, at=260, seconds=0.1))
        while "rolled back to step 200" not in rank.expect(wire.Notice).text:
            pass


def test_a_promise_without_a_verdict_is_aborted_and_asked_for_again() -> None:
    with daemon_process() as (path, process), SimulatedRank(path) as rank:
        rank.hello(rollback=TERMS)
        for start in range(0, 250, 50):
            rank.steps(start, HEALTHY[start : start + 50], step_seconds=[0.1] * 50)
            rank.say(wire.SnapshotTaken(seq=start, nbytes=1, seconds=0.1, time=0.0))
        rank.steps(250, [9.0] * 4, step_seconds=[0.1] * 4)
        prepare = rank.expect(wire.Prepare)
        kill(process)
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        hello = wire.Hello(
            version="t", identity=rank.identity, rollback=TERMS, next_seq=254, promise=prepare.id, snapshots=(150, 200)
        )
        rank.say(hello)
        assert rank.expect(wire.Abort).id == prepare.id
        commit = promised(rank, 200)
        assert commit.id != prepare.id
        rank.say(wire.RolledBack(id=commit.id, ok=True, to=200, at=260, seconds=0.1))
        while "rolled back to step 200" not in rank.expect(wire.Notice).text:
            pass
        (case,) = cases()
        assert case["done"] == ["rolled back to step 200 at the exit of step 260"]


@pytest.mark.slow
def test_a_new_daemon_waits_for_all_ranks_of_a_run() -> None:
    with daemon_process() as (path, process), contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(SimulatedRank(path, number, 2)) for number in range(2)]
        for rank in ranks:
            rank.hello()
            rank.steps(0, HEALTHY[:20])
        kept(lambda history: history.last_seq(0) == 19)
        kill(process)
    with daemon_process() as (path, _), contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(SimulatedRank(path, number, 2)) for number in range(2)]
        ranks[1].hello(next_seq=20)
        ranks[1].steps(20, [1.0, 1.0])
        ranks[0].hello(next_seq=20)
        ranks[0].steps(20, [3.0, math.nan])
        assert ranks[0].expect(wire.Notice).id == "r1/0.1/fired"
        (run,) = json.loads(sentinel("status", "--json").stdout)
        assert [rank["state"] for rank in run["ranks"]] == ["live", "live"]
        for rank in ranks:
            rank.say(wire.Goodbye())
    with History(paths.histories()[0]) as history:
        assert history.series("loss").values[20] == 2.0
        assert len(history.attempts()) == 1


@pytest.mark.slow
def test_a_rank_is_told_what_is_kept() -> None:
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        rank.say(wire.Hello(version="t", identity=rank.identity))
        assert rank.expect(wire.Welcome).keeps
        for seq in range(FRAMES):
            rank.steps(seq, [1.0])
        frames = rank.expect(wire.Kept).frames
        assert FRAMES <= frames <= FRAMES + 1
        kept(lambda history: history.last_seq(0) >= frames - 2)
        rank.say(wire.Goodbye())
        assert rank.expect(wire.Kept).frames == FRAMES + 2
        assert not path.parent.exists(), "what is ours goes before the last rank is told"


def test_damaged_state_does_not_stop_the_next_daemon() -> None:
    with daemon_process() as (path, process), SimulatedRank(path) as rank:
        rank.hello()
        rank.steps(0, [1.0, math.nan])
        rank.expect(wire.Notice)
        kill(process)
    with contextlib.closing(sqlite3.connect(paths.histories()[0])) as database, database:
        database.execute("UPDATE states SET body = zeroblob(9)")
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        rank.hello(next_seq=2)
        rank.steps(2, [1.0])
        assert rank.expect(wire.Notice).id == "r1/0.1/fired"
