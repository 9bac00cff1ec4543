"""Which snapshots the daemon orders to be written: good ones that all ranks hold, from time to time."""

from __future__ import annotations

from typing import Any

import pytest

from sentinel import wire
from sentinel.cluster.protocol.disk import NodeDisk
from sentinel.cluster.protocol.messages import RollbackOrder
from sentinel.daemon.run.context import RunContext
from sentinel.daemon.run.publishing import Publishing
from sentinel.runs import Attempt, Run
from tests.daemon.simulated import SimulatedRank, daemon_process

TERMS = wire.RollbackTerms(every=10, keep=2, margin=10, budget=3, disk_every=2)


class Ranks:
    """A run of two ranks, as the daemon sees it."""

    def __init__(self) -> None:
        self.run = Run("train", "train-1", 0.0)
        for rank in (0, 1):
            identity = wire.Identity(run="train", run_id="train-1", rank=rank, world_size=2, session=f"s{rank}")
            self.run.hello(wire.Hello(version="test", identity=identity, rollback=TERMS, step_offset=100), 0.0)
        self.sent: list[tuple[int, wire.Publish]] = []
        self.cancelled: list[tuple[int, wire.CancelPublish]] = []
        self.told: list[str] = []
        self.healthy = True
        self.publishing = Publishing(RunContext(self.run, None, self))

    def send(self, rank: int, message: wire.Message) -> None:
        if isinstance(message, wire.Notice):
            self.told.append(message.text.removeprefix("[sentinel] "))
        elif isinstance(message, wire.CancelPublish):
            self.cancelled.append((rank, message))
        else:
            assert isinstance(message, wire.Publish)
            self.sent.append((rank, message))

    def interrupt(self, process: int, signal: int) -> bool:
        return False

    def reach(self, seq: int) -> list[int]:
        """Close the steps up to `seq`, with a snapshot at every tenth, and return the snapshots that are ordered."""
        for rank in self.run.attempt.live:
            rank.snapshots = {at for at in (seq // 10 * 10 - 10, seq // 10 * 10) if at >= 0}
        before = len(self.sent)
        good = max((at for at in self.run.attempt.held if at + TERMS.margin <= seq), default=None)
        due = self.publishing.find_due(TERMS, seq)
        if self.healthy and due is not None and good is not None and good >= due:
            self.publishing.order(good)
        return sorted({message.seq for _, message in self.sent[before:]})

    def answer(self, ok: bool = True, **more: Any) -> tuple[int, float, int] | None:
        message = self.sent[-1][1]
        answers = [wire.Published(id=message.id, ok=ok, seq=message.seq, nbytes=5, **more) for _ in range(2)]
        return [self.publishing.add_part(rank, answer) for rank, answer in enumerate(answers)][-1]


def test_a_good_snapshot_is_ordered_and_then_one_from_time_to_time() -> None:
    ranks = Ranks()
    assert ranks.reach(9) == []  # the snapshot of step 0 is not good before step 10
    assert ranks.reach(10) == [0]
    assert {rank for rank, _ in ranks.sent} == {0, 1}
    assert ranks.sent[0][1].step == 100
    assert ranks.reach(45) == []  # the ranks are still writing
    assert ranks.answer(seconds=2.0) == (0, 2.0, 10)
    assert ranks.reach(25) == []  # step 10 is the newest good one
    assert ranks.reach(30) == [20]


def test_no_snapshot_is_ordered_while_an_alert_asks_for_a_rollback() -> None:
    ranks = Ranks()
    ranks.healthy = False
    assert ranks.reach(10) == []
    ranks.healthy = True
    assert ranks.reach(20) == [10]


def test_no_snapshot_is_ordered_that_a_rank_lacks_or_without_a_rank() -> None:
    ranks = Ranks()
    ranks.run.attempt.ranks[1].snapshots = set()
    assert ranks.publishing.find_due(TERMS, 50) is None
    ranks.run.attempt.lose(1, None)
    assert ranks.reach(50) == []


@pytest.mark.parametrize("terms", [None, wire.RollbackTerms(every=10, keep=2, margin=10, budget=3)])
def test_no_snapshot_is_ordered_where_none_is_wanted_on_disk(terms: wire.RollbackTerms | None) -> None:
    ranks = Ranks()
    ranks.run.attempt.ranks[0].snapshots = ranks.run.attempt.ranks[1].snapshots = {10}
    assert ranks.publishing.find_due(terms, 50) is None


def test_a_failure_is_reported_once_and_not_tried_at_every_step() -> None:
    ranks = Ranks()
    ranks.reach(10)
    assert ranks.answer(ok=False, reason="no space") is None
    assert ranks.told == ["the snapshot of step 100 was not written to disk: no space"]
    assert ranks.reach(19) == []
    assert ranks.reach(30) == [20]
    ranks.answer(ok=False, reason="no space")
    assert len(ranks.told) == 1


def test_ranks_do_not_wait_for_a_part_that_will_not_come() -> None:
    ranks = Ranks()
    ranks.reach(10)
    order = ranks.sent[-1][1]
    assert ranks.publishing.add_part(1, wire.Published(id=order.id, ok=False, seq=0, reason="not held")) is None
    assert ranks.cancelled == [(0, wire.CancelPublish(id=order.id))]
    assert ranks.publishing.add_part(0, wire.Published(id=order.id, ok=False, seq=0, reason="not wanted")) is None
    assert len(ranks.cancelled) == 1
    assert ranks.reach(30) == [20]
    assert ranks.answer() is not None, "both write the next one"
    assert len(ranks.cancelled) == 1


def test_after_a_rollback_the_next_good_one_comes_at_its_time() -> None:
    ranks = Ranks()
    ranks.reach(40)
    assert ranks.answer() is not None
    assert ranks.publishing.last == 30
    ranks.publishing.rewind(20)
    assert ranks.reach(50) == [40]


def test_ranks_are_told_of_a_snapshot_that_all_of_them_hold() -> None:
    with daemon_process() as (path, _), SimulatedRank(path, 0, 2) as one, SimulatedRank(path, 1, 2) as other:
        one.hello(rollback=TERMS)
        other.hello(rollback=TERMS)
        taken = [wire.SnapshotTaken(seq=seq, nbytes=1, seconds=0.1, time=0.0) for seq in (10, 20)]
        one.say(taken[0])  # the other rank took none at step 10
        for rank in (one, other):
            rank.say(taken[1])
        assert one.expect(wire.Held).seq == other.expect(wire.Held).seq == 20


class Node(Ranks):
    """The same two ranks, of four that are on two nodes."""

    def __init__(self, *, writes_parts: bool = True) -> None:
        super().__init__()
        self.run = Run("train", "train-1", 0.0)
        for rank in (2, 3):
            identity = wire.Identity(
                run="train", run_id="train-1", rank=rank, world_size=4, local_world_size=2, node=1, session=f"s{rank}"
            )
            hello = wire.Hello(
                version="test", identity=identity, rollback=TERMS, step_offset=100, writes_parts=writes_parts
            )
            self.run.hello(hello, 0.0)
        self.disk = NodeDisk()
        self.publishing = Publishing(RunContext(self.run, None, self), self.disk)

    def hold(self, *held: int, closed: int) -> int | None:
        """Let the ranks hold these snapshots and close steps up to `closed`; return the snapshot that is ordered."""
        for rank in self.run.attempt.live:
            rank.snapshots = set(held)
        due = self.publishing.find_due(TERMS, closed)
        chosen = self.publishing.choose([at for at in held if at + TERMS.margin <= closed], TERMS)
        if due is None or chosen is None or chosen < due:
            return None
        self.publishing.order(chosen)
        return chosen


def test_nodes_write_the_same_steps_without_asking_each_other() -> None:
    node = Node()
    assert node.hold(10, closed=25) is None, "all nodes choose from every twentieth"
    assert node.hold(10, 20, closed=30) == 20
    assert {message.ranks for _, message in node.sent} == {(2, 3)}
    message = node.sent[-1][1]
    first = wire.Published(id=message.id, ok=True, seq=20, kept=(100, 120), safe=100)
    assert node.publishing.add_part(2, first) is None
    assert node.publishing.add_part(3, wire.Published(id=message.id, ok=True, seq=20)) is not None
    assert (node.disk.kept, node.disk.safe) == ((100, 120), 100)
    node.disk.take_order(RollbackOrder(attempt=0, on_all=(80, 100), floor=80))
    assert node.hold(30, closed=45) is None
    assert node.hold(40, closed=55) == 40
    assert (node.sent[-1][1].on_all, node.sent[-1][1].floor) == ((100,), 80)
    node.publishing.rewind(10)
    assert (node.disk.kept, node.disk.on_all, node.disk.floor) == ((100,), (), -1), "what is younger is void"


def test_hooks_of_a_version_without_parts_are_asked_for_none() -> None:
    assert Node(writes_parts=False).hold(20, closed=30) is None


def test_a_node_that_writes_slowly_writes_every_second_or_fourth(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    assert node.hold(20, closed=30) == 20
    monkeypatch.setattr(Attempt, "closed_to", 50)  # more than two were due meanwhile
    message = node.sent[-1][1]
    for rank in (2, 3):
        node.publishing.add_part(rank, wire.Published(id=message.id, ok=True, seq=20))
    assert node.hold(60, 70, closed=90) is None
    assert node.hold(70, 80, closed=90) == 80
