"""What the daemon costs, and how its cost is divided among the ranks."""

from __future__ import annotations

import time

import pytest
import torch

import sentinel
from sentinel import wire
from sentinel.daemon.ingest.accounting import Accounting
from sentinel.runs import Rank
from tests.daemon.simulated import daemon_process
from tests.hooks.sessions import list_sessions


def rank(number: int) -> Rank:
    identity = wire.Identity(run="train", run_id="r1", rank=number)
    return Rank(wire.Hello(version="t", identity=identity), 0.0)


class Clock:
    """A clock of the CPU seconds that the daemon has used."""

    def __init__(self) -> None:
        self.used = 0.0

    def __call__(self) -> float:
        return self.used


def turned(accounting: Accounting, clock: Clock, seconds: float, now: float, sent: dict[Rank, int]) -> list[Rank]:
    """Let a second pass in which the daemon uses `seconds` of CPU time and the ranks send `sent` bytes."""
    clock.used += seconds
    for one, nbytes in sent.items():
        accounting.count_frame(one, nbytes)
    return accounting.turn(list(sent), now)


def test_the_cost_is_divided_by_what_the_ranks_sent() -> None:
    clock, busy, quiet = Clock(), rank(0), rank(1)
    accounting = Accounting(clock)
    clock.used = 3.0  # used by its start
    for second in range(20):
        turned(accounting, clock, 0.04, float(second), {busy: 3000, quiet: 1000})
    assert busy.daemon_share == pytest.approx(0.03, rel=0.01)
    assert quiet.daemon_share == pytest.approx(0.01, rel=0.01)


def test_the_cost_is_divided_equally_while_no_rank_sends() -> None:
    clock, one, other = Clock(), rank(0), rank(1)
    accounting = Accounting(clock)
    for second in range(3):
        turned(accounting, clock, 0.004, float(second), {one: 0, other: 0})
    assert one.daemon_share == other.daemon_share == pytest.approx(0.002)


def test_a_rank_is_told_its_share_only_when_it_changed() -> None:
    clock, one = Clock(), rank(0)
    accounting = Accounting(clock)
    uses = [9.0, 0.01, 0.0101, 0.0099, 0.01, *[0.03] * 20]
    told = [s for s, used in enumerate(uses) if turned(accounting, clock, used, float(s), {one: 100})]
    assert told[:2] == [1, 5], "what was used before the first turn is the start's; a hundredth more or less is no news"
    assert len(told) < 8, "on the way to a new level it is not told at each turn"
    assert one.daemon_share == pytest.approx(0.03, rel=0.01)


def test_a_rank_that_comes_later_does_not_pay_for_its_hello() -> None:
    clock, first, second = Clock(), rank(0), rank(1)
    accounting = Accounting(clock)
    for now in range(3):
        turned(accounting, clock, 0.01, float(now), {first: 100})
    turned(accounting, clock, 0.5, 3.0, {first: 100, second: 100_000})
    assert second.daemon_share == 0.0
    turned(accounting, clock, 0.01, 4.0, {first: 100, second: 100})
    assert second.daemon_share == pytest.approx(0.005)


@pytest.mark.slow
@pytest.mark.processes
def test_a_real_daemon_tells_real_hooks() -> None:
    with daemon_process() as (path, _):
        net = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        with sentinel.attach(net, optimizer, address=f"unix:{path}", run="train"):
            (watch,) = list_sessions()
            deadline = time.monotonic() + 60
            while not watch.governor.costs.get("daemon"):
                assert time.monotonic() < deadline, watch.governor.costs
                net(torch.randn(2, 4)).sum().backward()
                optimizer.step()
                time.sleep(0.005)  # the loop's own work
        assert 0 < watch.governor.costs["daemon"] < 1
        assert watch.governor.costs["sender"] > 0
