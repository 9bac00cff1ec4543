"""All ranks of a run have the same spacings."""

from __future__ import annotations

import dataclasses
import time
from array import array

import pytest
import torch

import sentinel
from sentinel import wire
from sentinel.daemon.run.spacing import BETWEEN_SECONDS, LEAD_STEPS, PATIENCE_SECONDS, Spacings
from sentinel.hooks.core import governor as hooks_governor
from sentinel.runs import Attempt
from tests.daemon.simulated import SimulatedRank, daemon_process
from tests.hooks.governed import make_governor
from tests.hooks.sessions import list_sessions


@dataclasses.dataclass
class Ranks:
    """Real governors, the real code that orders spacings, and a connection that takes a step to deliver."""

    count: int
    step_seconds: float = 0.5

    def __post_init__(self) -> None:
        self.attempt = Attempt(0, 0.0)
        self.pacings = [make_governor(0.01) for _ in range(self.count)]
        self.post: list[tuple[int, wire.Spacing]] = []
        self.orders = 0
        self.now, self.seq = 0.0, 0
        self.sampled: list[list[int]] = [[] for _ in range(self.count)]
        self.spacings = Spacings(self.attempt, self)
        for number in range(self.count):
            identity = wire.Identity(run="t", run_id="r1", rank=number, world_size=self.count, session=f"s{number}")
            self.attempt.hello(wire.Hello(version="t", identity=identity), 0.0)

    def send(self, rank: int, message: wire.Message) -> None:
        assert isinstance(message, wire.Spacing)
        self.post.append((rank, message))
        self.orders += rank == 0

    def run(self, steps: int, cost: list[float]) -> None:
        """Make `steps` steps in which each rank's sample of the layers takes its seconds of `cost`."""
        for _ in range(steps):
            for rank, order in self.post:
                self.pacings[rank].order(order.at, {int(tier): every for tier, every in order.tiers.items()})
            self.post.clear()
            for number, governor in enumerate(self.pacings):
                own = 0.0
                if governor.due(2, self.seq):
                    self.sampled[number].append(self.seq)
                    own = cost[number]
                    governor.record_sample(2, own)
                governor.record_step(self.seq, self.step_seconds, own)
                self._report(number, governor.pace)
            self.seq += 1
            self.now += self.step_seconds
            list(self.attempt.take_closed(self.now))
            self.spacings.tick(self.now)

    def _report(self, number: int, pace: wire.Pace) -> None:
        seqs, times = array("q", [self.seq]).tobytes(), array("d", [self.now]).tobytes()
        columns = {"step_seconds": wire.Column(array("d", [self.step_seconds]).tobytes())}
        batch = wire.Batch(seqs=seqs, times=times, columns=columns, pace=pace)
        self.attempt.take(self.attempt.ranks[number], batch, self.now)


def test_all_ranks_take_the_coarsest_at_the_same_step() -> None:
    ranks = Ranks(3)
    ranks.run(200, [0.001, 0.013, 0.09])
    assert [governor.wanted[2] for governor in ranks.pacings] == [1, 4, 32]
    assert [governor.spacing[2] for governor in ranks.pacings] == [32, 32, 32]
    ordered = ranks.spacings.ordered
    assert ordered is not None
    later = [[seq for seq in seqs if seq >= ordered.at] for seqs in ranks.sampled]
    assert later[0] == later[1] == later[2] == [seq for seq in range(ordered.at, 200) if seq % 32 == 0]
    assert ranks.orders <= 3, "now and then, and not at each look"


def test_no_spacing_is_ordered_where_all_ranks_want_the_same() -> None:
    ranks = Ranks(2)
    ranks.run(100, [0.02, 0.02])
    assert ranks.orders == 0


def test_a_single_rank_governs_itself() -> None:
    ranks = Ranks(1)
    ranks.run(100, [0.09])
    assert ranks.orders == 0
    assert ranks.pacings[0].spacing[2] == 32


def test_a_finer_spacing_waits_until_it_has_sufficed_for_long() -> None:
    ranks = Ranks(2, step_seconds=0.05)
    ranks.run(300, [0.0001, 0.002])
    assert [governor.spacing[2] for governor in ranks.pacings] == [8, 8]
    orders, at = ranks.orders, ranks.now
    while ranks.pacings[0].spacing[2] == 8:
        ranks.run(1, [0.0001, 0.0001])
    assert [governor.spacing[2] for governor in ranks.pacings] == [1, 1]
    assert ranks.orders == orders + 1
    assert ranks.now - at >= PATIENCE_SECONDS


def test_a_rank_that_came_back_is_ordered_again() -> None:
    ranks = Ranks(2)
    ranks.run(200, [0.0001, 0.09])
    ranks.pacings[0].clear_orders()
    ranks.run(100, [0.0001, 0.09])
    assert [governor.spacing[2] for governor in ranks.pacings] == [32, 32]


def test_an_order_takes_effect_ahead_of_all_ranks() -> None:
    ranks = Ranks(2)
    ranks.run(12, [0.0001, 0.09])
    assert ranks.post or ranks.spacings.ordered is not None
    ordered = ranks.spacings.ordered
    assert ordered is not None
    assert ordered.at >= LEAD_STEPS
    assert 2 * ranks.step_seconds <= BETWEEN_SECONDS


@pytest.mark.slow
@pytest.mark.processes
def test_real_hooks_beside_a_rank_that_wants_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is a real loop with no limit on its cost; rank 1 reports that it wants every 32nd step."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("SENTINEL_RUN_ID", "both")
    pace = wire.Pace(spacing={"1": 16, "2": 32}, wanted={"1": 16, "2": 32}, costs={})
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with daemon_process() as (path, _), sentinel.attach(net, optimizer, address=f"unix:{path}", overhead=1.0):
        (watch,) = list_sessions()
        identity = watch.who.resolve()
        assert identity is not None
        with SimulatedRank(path, 1, 2, run_id=identity.run_id) as other:
            other.hello()
            seq, deadline = 0, time.monotonic() + 60
            while watch.governor.spacing != {0: 1, 1: 16, 2: 32, 3: 256}:
                assert time.monotonic() < deadline, watch.governor.spacing
                net(torch.randn(2, 4)).sum().backward()
                optimizer.step()
                time.sleep(0.005)  # the loop's own work
                seqs, times = array("q", [seq]).tobytes(), array("d", [1e9 + seq]).tobytes()
                columns = {"step_seconds": wire.Column(array("d", [0.005]).tobytes())}
                other.say(wire.Batch(seqs=seqs, times=times, columns=columns, pace=pace))
                seq += 1
            assert watch.governor.wanted[2] <= hooks_governor.FIRST[2]
            order = other.expect(wire.Spacing)
            assert order.tiers == {"0": 1, "1": 16, "2": 32, "3": 256}
            assert order.at <= seq
