"""Rollback is armed only while all ranks are connected and each of them offers it."""

from __future__ import annotations

import contextlib

import pytest

from sentinel import wire
from tests.daemon.simulated import SimulatedRank, daemon_process
from tests.daemon.test_daemon import HEALTHY, TERMS

pytestmark = pytest.mark.processes


def train(rank: SimulatedRank, terms: wire.RollbackTerms | None = TERMS) -> None:
    """Train until a snapshot is good."""
    rank.hello(rollback=terms)
    for start in range(0, 250, 50):
        rank.steps(start, HEALTHY[start : start + 50], step_seconds=[0.1] * 50)
        rank.say(wire.SnapshotTaken(seq=start, nbytes=1, seconds=0.1, time=0.0))


def told_of_a_spike(ranks: list[SimulatedRank]) -> str:
    """Report a spike and return the first rank's notice, after a check that no rank is asked to promise anything."""
    for rank in ranks:
        rank.steps(250, [9.0] * 5, step_seconds=[0.1] * 5)
    text = ranks[0].expect(wire.Notice).text
    for rank in ranks:
        rank.say(wire.Goodbye())
        with pytest.raises(AssertionError, match="closed the connection"):
            rank.expect(wire.Prepare)
    return text


@pytest.mark.slow
def test_no_rollback_while_a_rank_has_not_come() -> None:
    with daemon_process() as (path, _), contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(SimulatedRank(path, number, 3)) for number in range(2)]
        for rank in ranks:
            train(rank)
        told = " ".join(told_of_a_spike(ranks).replace("┃", " ").split())
    assert "not rolled back: not every rank of the run is connected" in told


@pytest.mark.slow
def test_no_rollback_where_a_rank_did_not_arm_it() -> None:
    with daemon_process() as (path, _), contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(SimulatedRank(path, number, 2)) for number in range(2)]
        for rank, terms in zip(ranks, (TERMS, None), strict=True):
            train(rank, terms)
        assert "roll" not in told_of_a_spike(ranks).partition("┃ done")[2].partition("┃ more")[0]
