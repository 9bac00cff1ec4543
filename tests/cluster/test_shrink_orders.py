"""With which nodes a job goes on if some may be left out, and which daemon may decide it: pure decisions."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from sentinel import wire
from sentinel.cluster.protocol.blame import BlameLedger
from sentinel.cluster.protocol.coordinator import Coordinator
from sentinel.cluster.protocol.election import next_epoch
from sentinel.cluster.protocol.messages import Beat, Pulse
from sentinel.cluster.protocol.node import Node
from sentinel.cluster.protocol.restart import PATIENCE_SECONDS
from sentinel.supervise.job_nodes import JobNodes

LATE = PATIENCE_SECONDS + 1.0


class Supervisor:
    """The reports of a node's `sentinel run`, and what it does on orders."""

    def __init__(self, node: int, whole: int, least: int, mark: str = "mark") -> None:
        self.node, self.nodes, self._mark = node, JobNodes(least, node, whole), mark
        self.start, self.status = 0, -9
        self.fault: wire.JobFault | None = None
        self.end()

    def end(self) -> None:
        self.fault = wire.JobFault(kind="RankLost", words="RankLost")

    @property
    def report(self) -> wire.JobReport:
        report = wire.JobReport(
            start=self.start, attempt=self.start, restarts=3, fault=self.fault, status=self.status,
            mark=f"{self._mark} {self.node}",
        )  # fmt: skip
        return self.nodes.add_to(report)

    def take(self, order: wire.Order | None) -> None:
        """Take an order, which may be about another start."""
        if order is None or order.start != self.start or self.nodes.is_left_out(order):
            return
        self.nodes.hear(order)
        if order.does == "begin" and self.fault is not None:
            self.nodes.begin(order)
            self.start, self.fault = self.start + 1, None


class Job:
    """Nodes that have all ended, and their coordinator."""

    def __init__(self, whole: int, least: int = 1) -> None:
        self.whole, self.epoch = whole, 0
        self.supervisors = [Supervisor(node, whole, least) for node in range(whole)]
        self.elect(0, 0.0)

    def elect(self, node: int, now: float) -> None:
        """Make a node the coordinator, which knows only what its own supervisor reports."""
        members = self.supervisors[node].nodes.members
        self.epoch = next_epoch(self.epoch, node)
        self.coordinator = Coordinator(node, members.count(self.whole), self.epoch, now, (), members)

    def hear(self, nodes: Iterable[int], now: float) -> wire.Order | None:
        """Let the coordinator hear these nodes, which follow it. Returns its order."""
        for node in nodes:
            report = self.supervisors[node].report
            self.coordinator.take_pulse(
                Pulse(
                    node=node, incarnation=1, hostname=f"host{node}", attempt=0, step=0, epoch=self.epoch, stamp=now,
                    job=report,
                ),
                now,
            )  # fmt: skip
        return self.coordinator.order_nodes(now)

    def settle(self, nodes: Iterable[int], now: float) -> wire.Order | None:
        """Exchange orders and reports until nothing more follows from them. Returns the last order."""
        order, before = self.hear(nodes, now), None
        while order != before:
            for node in nodes:
                self.supervisors[node].take(order)
            before, order = order, self.hear(nodes, now)
        return before

    def fail(self, nodes: Iterable[int]) -> None:
        """End the present start of these nodes."""
        for node in nodes:
            self.supervisors[node].end()

    def list_running(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """Return (node, start, its group) of the nodes that have begun again."""
        return [
            (one.node, one.start, one.nodes.members.nodes)
            for one in self.supervisors
            if one.start and one.fault is None
        ]


def test_without_one_of_four_three_go_on_then_two_and_never_one() -> None:
    job = Job(4)
    waiting = job.settle([0, 1, 3], 0.0)
    assert waiting is not None
    assert (waiting.does, waiting.nodes) == ("end", ())
    assert job.list_running() == []
    job.settle([0, 1, 3], LATE)
    assert job.list_running() == [(node, 1, (0, 1, 3)) for node in (0, 1, 3)]
    assert job.coordinator.expected == 3
    job.fail([0, 1, 3])
    job.settle([0, 3], LATE + 1.0)
    job.settle([0, 3], 3 * LATE)
    assert job.list_running() == [(node, 2, (0, 3)) for node in (0, 3)]
    job.fail([0, 3])
    for now in (4 * LATE, 6 * LATE):
        assert job.settle([0], now) is None
    assert job.list_running() == []


def test_half_of_the_nodes_is_never_enough() -> None:
    job = Job(4)
    for now in (0.0, LATE, 2 * LATE):
        assert job.settle([0, 1], now) is None
    job.elect(2, 0.0)
    for now in (0.0, LATE, 2 * LATE):
        assert job.settle([2, 3], now) is None
    assert job.list_running() == []


def test_all_that_are_there_begin_at_once_though_some_may_be_left_out() -> None:
    job = Job(3)
    job.settle([0, 1, 2], 0.0)
    assert job.list_running() == [(node, 1, (0, 1, 2)) for node in range(3)]


@pytest.mark.parametrize(
    ("heard", "least", "why"),
    [
        ([0, 1, 2], 4, "--allow-shrink 4 wants more than 3"),
        ([1, 2, 3], 2, "node 0, where the ranks meet, cannot be left out"),
        ([0, 1, 2, 3], 2, "node 4 completed the run"),
    ],
)
def test_a_job_that_cannot_go_on_without_a_node_is_stopped_and_says_why(heard: list[int], least: int, why: str) -> None:
    job = Job(5 if 3 in heard and 0 in heard else 4, least)
    job.elect(1, 0.0)
    if job.whole == 5:
        job.supervisors[4].fault, job.supervisors[4].status = None, 0
        job.hear([4], 0.0)
    job.settle(heard, 0.0)
    order = job.settle(heard, LATE)
    assert order is not None
    assert order.does == "stop"
    assert order.why.endswith(why)
    assert job.list_running() == []


@pytest.mark.parametrize("other", [0, 3])
def test_nodes_with_different_minima_stop_and_so_do_those_of_an_earlier_version(other: int) -> None:
    job = Job(4, 2)
    job.supervisors[1].nodes.least = other
    job.settle([0, 1, 2], 0.0)
    order = job.settle([0, 1, 2], LATE)
    assert order is not None
    assert (order.does, order.why) == (
        "stop",
        f"the nodes have different --allow-shrink: {min(other, 2)}, {max(other, 2)}",
    )


def test_nothing_begins_before_all_that_go_on_have_agreed() -> None:
    job = Job(5)
    job.settle([0, 1, 2], 0.0)
    proposal = job.hear([0, 1, 2], LATE)
    assert proposal is not None
    assert (proposal.does, proposal.nodes) == ("end", (0, 1, 2))
    for node in (0, 1):
        job.supervisors[node].take(proposal)
    assert job.hear([0, 1, 2], LATE) == proposal
    job.supervisors[2].take(proposal)
    begin = job.hear([0, 1, 2], LATE)
    assert begin is not None
    assert (begin.does, begin.nodes) == ("begin", (0, 1, 2))


@pytest.mark.parametrize("begun", [[], [2]], ids=["none has begun", "one has begun"])
def test_the_next_coordinator_completes_what_was_decided_though_the_lost_are_there_again(begun: list[int]) -> None:
    job = Job(5)
    job.settle([0, 1, 2], 0.0)
    proposal = job.hear([0, 1, 2], LATE)
    for node in (0, 1, 2):
        job.supervisors[node].take(proposal)
    begin = job.hear([0, 1, 2], LATE)
    assert begin is not None
    assert begin.does == "begin"
    for node in begun:
        job.supervisors[node].take(begin)
    job.elect(1, LATE)
    job.settle([0, 1, 2, 3, 4], LATE + 1.0)
    assert job.list_running() == [(node, 1, (0, 1, 2)) for node in (0, 1, 2)]
    assert job.coordinator.members.left_out == (3, 4)


def test_a_proposal_that_one_node_took_binds_the_next_coordinator_too() -> None:
    job = Job(5)
    job.settle([0, 1, 2, 3], 0.0)
    proposal = job.hear([0, 1, 2, 3], LATE)
    job.supervisors[3].take(proposal)
    job.elect(1, LATE)
    job.settle([0, 1, 2, 3, 4], LATE + 1.0)
    assert job.list_running() == [(node, 1, (0, 1, 2, 3)) for node in (0, 1, 2, 3)]


def test_nodes_of_which_one_drops_the_mark_of_the_job_come_to_an_agreement() -> None:
    """A daemon of an earlier version drops it, in both directions."""
    job = Job(3)
    for now in (0.0, 1.0, 2.0):
        order = job.hear(range(3), now)
        assert order is not None
        for supervisor in job.supervisors:
            supervisor.take(order if supervisor.node else msgspec.structs.replace(order, job=""))
    assert order.job == "mark 0"
    assert job.list_running() == [(node, 1, (0, 1, 2)) for node in range(3)]


def test_an_order_of_a_former_coordinator_is_not_agreed_to() -> None:
    nodes = JobNodes(1, 2, 5)
    order = wire.Order(start=0, does="end", epoch=20)
    assert nodes.hear(order)
    assert not nodes.hear(order)
    assert not nodes.hear(wire.Order(start=0, does="end", epoch=10, nodes=(0, 1, 2)))
    assert nodes.accepted is None


def test_a_coordinator_that_missed_the_decision_does_not_act_with_a_node_that_took_part_in_it() -> None:
    job = Job(5)
    stale = Coordinator(3, 5, next_epoch(job.epoch, 3), 0.0, (), job.supervisors[3].nodes.members)
    job.settle([0, 1, 2], 0.0)
    proposal = job.hear([0, 1, 2], LATE)
    for node, agreed in ((4, False), (3, False), (2, True)):
        if agreed:
            job.supervisors[node].take(proposal)
        pulse = Pulse(
            node=node, incarnation=1, hostname="h", attempt=0, step=0, epoch=stale.epoch, stamp=LATE,
            last_job=job.supervisors[node].report,  # also where its supervisor is gone
        )  # fmt: skip
        stale.take_pulse(pulse, LATE)
    assert not stale.is_acting(LATE), "its three nodes are most of five, and not of the three that may have begun"


def test_a_node_that_was_left_out_counts_for_nothing_and_learns_it_from_a_beat() -> None:
    job = Job(4)
    job.settle([0, 1, 3], 0.0)
    job.settle([0, 1, 3], LATE)
    before = job.coordinator.list_nodes(LATE)
    assert not job.coordinator.take_pulse(
        Pulse(node=2, incarnation=2, hostname="h", attempt=0, step=0, epoch=1 << 60, stamp=LATE), LATE
    )
    assert job.coordinator.list_nodes(LATE) == before
    assert job.coordinator.epoch == job.epoch, "nor does it follow its epoch"
    lost, member = Node(2, 1, 0.0, 4), Node(3, 1, 0.0, 4)
    for node in (lost, member):
        node.take_beat(job.coordinator.make_beat(LATE), LATE)
    assert (lost.is_left_out, member.is_left_out) == (True, False)
    beat = Beat(node=2, epoch=1 << 60, stamp=LATE, acting=True, expected=4, nodes=())
    member.take_beat(beat, 2 * LATE)
    assert member.election.leader == 0
    excluded = wire.Order(start=1, does="stop", nodes=lost.members.nodes)
    assert job.supervisors[2].nodes.is_left_out(excluded)
    assert not job.supervisors[3].nodes.is_left_out(excluded)


def test_nothing_is_proposed_to_nodes_that_may_still_agree_with_a_former_coordinator() -> None:
    job = Job(3)
    first = job.hear([0, 1, 2], 0.0)
    assert first is not None
    assert (first.does, first.nodes) == ("end", ())
    for node in (0, 1):
        job.supervisors[node].take(first)
    assert job.hear([0, 1, 2], 1.0) == first
    job.supervisors[2].take(first)
    proposal = job.hear([0, 1, 2], 2.0)
    assert proposal is not None
    assert proposal.nodes == (0, 1, 2)


def test_what_may_have_been_decided_is_not_waited_for_a_second_time() -> None:
    job = Job(5)
    job.settle([0, 1, 2], 0.0)
    proposal = job.hear([0, 1, 2], LATE)
    for node in (0, 1, 2):
        job.supervisors[node].take(proposal)
    job.elect(1, LATE)
    job.settle([0, 1, 2], LATE + 1.0)
    assert job.list_running() == [(node, 1, (0, 1, 2)) for node in (0, 1, 2)]


def test_a_coordinator_whose_clock_was_set_back_comes_to_an_agreement_though_all_daemons_are_new() -> None:
    job = Job(3)
    job.supervisors[1].nodes.promised = 1 << 40
    job.settle([0, 1, 2], 0.0)
    assert job.list_running() == [(node, 1, (0, 1, 2)) for node in range(3)]


def test_a_coordinator_left_over_from_a_job_that_is_over_leaves_no_node_out_of_the_next_one() -> None:
    job = Job(3)
    for now in (0.0, LATE):
        job.settle([0, 1], now)
    of_next = Node(2, 1, LATE, 3)
    of_next.note_members(wire.Members(nodes=(0, 1, 2), whole=3))
    for node in (0, 1):
        gone = Pulse(
            node=node, incarnation=1, hostname="h", attempt=0, step=0, last=1, epoch=job.epoch, stamp=LATE,
            last_job=job.supervisors[node].report,
        )  # fmt: skip
        job.coordinator.take_pulse(gone, LATE)
    of_next.take_beat(job.coordinator.make_beat(LATE), LATE)
    assert not of_next.is_left_out


FORMER = wire.Members(start=1, nodes=(0, 1, 3), whole=4, job="mark 0 of a former job")


def former_pulse(node: int, incarnation: int) -> Pulse:
    """Return the pulse of a daemon of a former job, with the same run id, that went on without node 2."""
    order = wire.Order(start=0, does="end", epoch=16, nodes=FORMER.nodes, job=FORMER.job)
    job = wire.JobReport(start=1, attempt=7, restarts=3, allow_shrink=2, members=FORMER, accepted=order)
    return Pulse(node=node, incarnation=incarnation, hostname="h", attempt=7, step=0, job=job)


@pytest.mark.parametrize("incarnation", [0, 2], ids=["its next daemon is known", "it comes first"])
def test_a_daemon_of_a_former_job_shrinks_no_other(incarnation: int) -> None:
    job = Job(4)
    for supervisor in job.supervisors:
        supervisor.fault = None
    job.hear([0, 1, 2] if incarnation else [0, 1, 2, 3], 0.0)
    job.coordinator.take_pulse(former_pulse(3, incarnation), 0.1)
    job.fail(range(4))
    order = job.hear([0, 1, 2], 0.2)
    assert order is not None
    assert (order.does, order.nodes) == ("end", ())
    assert job.coordinator.expected == 4
    if not incarnation:
        job.settle(range(4), 0.3)
        assert job.list_running() == [(node, 1, (0, 1, 2, 3)) for node in range(4)]


def test_a_beat_of_a_former_job_leaves_no_node_out() -> None:
    node, late = Node(2, 1, 0.0), Node(2, 1, 0.0)
    for one in (node, late):
        one.note_members(wire.Members(nodes=(0, 1, 2, 3), whole=4))
    beat = Beat(node=0, epoch=1600, stamp=1.0, acting=True, expected=4, nodes=(), members=node.members)
    node.take_beat(msgspec.structs.replace(beat, members=wire.Members(nodes=(0, 1, 2, 3), whole=4, job="mark 0")), 9.0)
    former = msgspec.structs.replace(beat, epoch=16, members=FORMER)
    node.take_beat(former, 9.1)
    late.take_beat(msgspec.structs.replace(former, acting=False), 1.0)
    assert not node.is_left_out
    assert not late.is_left_out
    node.take_beat(msgspec.structs.replace(former, members=msgspec.structs.replace(FORMER, job="mark 0")), 9.2)
    assert node.is_left_out, "of its own job"


def test_the_next_job_of_the_run_id_has_neither_the_orders_nor_the_blame_of_one_that_shrank() -> None:
    """The daemons stayed. Node 1 has the role, and has not heard the next job's supervisors yet."""
    job = Job(4)
    for now in (0.0, LATE):
        job.settle([0, 1, 3], now)
    job.elect(1, LATE)
    job.fail([0, 1, 3])
    before = job.hear([0, 1, 3], LATE)
    assert before is not None
    assert (before.start, before.does) == (1, "end")
    job.supervisors = [Supervisor(node, 4, 1, mark="next") for node in range(4)]
    job.supervisors[3].fault = None
    order = job.hear([0, 3], LATE + 1.0)
    assert order is not None
    assert (order.start, order.does, order.job, order.nodes) == (0, "end", "next 0", ()), "its own, of node 0's fault"
    node = Node(1, 1, 0.0, 3)
    node.note_members(FORMER)
    node.forget_members()
    assert node.members.count(4) == 4
    taken_over = BlameLedger({3: 2}, 2)
    job.coordinator = Coordinator(1, 4, job.epoch, LATE + 2.0, (), node.members, taken_over)
    job.hear([0, 3], LATE + 2.0)
    assert job.coordinator.make_beat(LATE + 2.0).blame == {}
