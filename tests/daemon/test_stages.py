"""A run announces a stage to a real daemon: what the loss does at its start is no fault, what comes later is."""

from __future__ import annotations

import json

import pytest

from sentinel import wire
from sentinel.node import paths
from sentinel.runs import Attempt, Stage
from sentinel.store import History
from tests.daemon.simulated import SimulatedRank, daemon_process
from tests.daemon.test_daemon import HEALTHY, RNG, sentinel
from tests.daemon.test_restart import kept, kill

pytestmark = pytest.mark.processes

TERMS = wire.RollbackTerms(every=50, keep=4, margin=20, budget=3)
HARDER = [9.0 - seq / 200 + RNG.gauss(0, 0.01) for seq in range(200)]


def stage(rank: SimulatedRank, seq: int, name: str = "harder") -> None:
    rank.say(wire.StageBegan(name=name, seq=seq, time=0.0))


def steps(rank: SimulatedRank, first: int, losses: list[float]) -> None:
    rank.steps(first, losses, step_seconds=[0.1] * len(losses))
    rank.say(wire.SnapshotTaken(seq=first + len(losses) - 1, nbytes=1, seconds=0.1, time=0.0))


def said(rank: SimulatedRank) -> list[wire.Message]:
    """Return the notices and orders that have arrived so far, apart from spacings."""
    rank.say(wire.Query(what="nothing"))
    rank.expect(wire.Answer)
    return [message for message in rank.arrived if isinstance(message, wire.Notice | wire.Prepare | wire.Stop)]


def test_a_loss_that_jumps_with_a_stage_is_neither_reported_nor_rolled_back() -> None:
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        rank.hello(rollback=TERMS)
        for start in range(0, 250, 50):
            steps(rank, start, HEALTHY[start : start + 50])
        stage(rank, 250)
        for start in range(0, 200, 50):
            steps(rank, 250 + start, HARDER[start : start + 50])
        assert said(rank) == []
        assert json.loads(sentinel("incidents", "--json").stdout) == []
        rank.steps(450, [60.0, 70.0, 80.0, 90.0], step_seconds=[0.1] * 4)
        assert rank.expect(wire.Prepare).to == 399
    with History(paths.histories()[0]) as history:
        assert [(event.seq, event.detail) for event in history.events("stage")] == [(250, {"name": "harder"})]


def test_no_rollback_crosses_the_start_of_a_stage() -> None:
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        rank.hello(rollback=TERMS)
        for start in range(0, 250, 50):
            steps(rank, start, HEALTHY[start : start + 50])
        stage(rank, 250)
        rank.steps(250, HARDER[:60], step_seconds=[0.1] * 60)
        rank.steps(310, [60.0, 70.0, 80.0, 90.0], step_seconds=[0.1] * 4)
        assert "LossSpike" in rank.expect(wire.Notice).text
        (case,) = json.loads(sentinel("incidents", "--json").stdout)
        assert "none is gone back to from before stage 'harder'" in case["done"][-1]
        assert not [message for message in said(rank) if isinstance(message, wire.Prepare)]


def test_open_incidents_end_with_a_new_stage_and_say_why() -> None:
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        rank.hello()
        rank.steps(0, HEALTHY[:200])
        rank.steps(200, [8.0, 8.5, 9.0, 9.5])
        assert "LossSpike" in rank.expect(wire.Notice).text
        stage(rank, 204)
        rank.steps(204, HARDER[:5])
        rank.expect(wire.Notice)
        (case,) = json.loads(sentinel("incidents", "--json").stdout)
        assert (case["state"], case["done"][-1]) == ("resolved", "over: stage 'harder' began")


@pytest.mark.slow
def test_of_several_ranks_the_first_that_says_it_counts_once() -> None:
    with daemon_process() as (path, _), SimulatedRank(path, 0, 2) as one, SimulatedRank(path, 1, 2) as two:
        for rank in (one, two):
            rank.hello()
        for start in range(0, 200, 50):
            for rank in (one, two):
                rank.steps(start, HEALTHY[start : start + 50])
        stage(two, 200)
        two.steps(200, HARDER[:100])
        one.steps(200, HARDER[:100])
        stage(one, 200)  # as late as is allowed
        for rank in (one, two):
            rank.steps(300, HARDER[100:110])
        assert not [message for rank in (one, two) for message in said(rank)]
        with History(paths.histories()[0]) as history:
            kept(lambda _: history.last_seq(0) == 309)
            assert len(history.events("stage")) == 1
        one.steps(310, [60.0, 70.0, 80.0])
        two.steps(310, [60.0, 70.0, 80.0])
        assert "LossSpike" in one.expect(wire.Notice).text, "the late one started nothing over"


def test_a_stage_is_known_by_its_step_and_name() -> None:
    attempt = Attempt(0, 0.0)
    said = [(10, "a"), (10, "a"), (12, "a"), (20, "b"), (10, "a"), (20, "b"), (30, "a")]
    assert [attempt.announce_stage(Stage(*one)) for one in said] == [True, False, False, True, False, False, True]
    assert attempt.stage_seq == 30


@pytest.mark.slow
@pytest.mark.parametrize("begun", [True, False])
def test_a_daemon_that_takes_over_knows_the_stage(begun: bool) -> None:
    with daemon_process() as (path, process), SimulatedRank(path) as rank:
        rank.hello(rollback=TERMS)
        for start in range(0, 250, 50):
            steps(rank, start, HEALTHY[start : start + 50])
        stage(rank, 250)
        if begun:
            steps(rank, 250, HARDER[:5])
        last = 254 if begun else 249
        kept(lambda history: history.last_seq(0) == last and history.events("stage"))
        kill(process)
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        held = (199, 249)
        rank.say(wire.Hello(version="t", identity=rank.identity, rollback=TERMS, next_seq=last + 1, snapshots=held))
        rank.expect(wire.Welcome)
        stage(rank, 250)  # sent again, as it was not confirmed
        rank.steps(last + 1, HARDER[last - 249 : 100], step_seconds=[0.1] * (100 - (last - 249)))
        assert said(rank) == []
        rank.steps(350, [60.0, 70.0, 80.0, 90.0], step_seconds=[0.1] * 4)
        assert "LossSpike" in rank.expect(wire.Notice).text
        (case,) = json.loads(sentinel("incidents", "--json").stdout)
        assert "from before stage" in case["done"][-1]
