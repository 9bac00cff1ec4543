"""Which daemon makes the ranks of all nodes leave, and what prevents it: the nodes' daemons without a network."""

from __future__ import annotations

import random

import msgspec
import pytest

from sentinel import wire
from sentinel.actions.rollback import FRUITLESS, PREPARE_SECONDS
from sentinel.actions.stop import StopAction
from sentinel.cluster.orders import NO_ORDERS
from sentinel.cluster.protocol.relay import APART, ASK_SECONDS
from sentinel.cluster.protocol.rollback import ARRIVAL_SECONDS
from sentinel.diagnose.case import Case
from tests.cluster.test_rollback_orders import SIGN, SILENT, TERMS, Job, Loop, Node, vote
from tests.diagnose.test_evidence import case


def unarmed(number: int, *, takes_stop: bool = True) -> Node:
    """A node whose rank has no rollback."""
    node = Node(number)
    node.rank.hello = msgspec.structs.replace(node.rank.hello, rollback=None, takes_stop=takes_stop)
    return node


def make_job(*, armed: bool = False) -> Job:
    job = Job(unarmed(0), unarmed(1))
    for node in job.nodes if armed else ():
        node.rank.hello = msgspec.structs.replace(node.rank.hello, rollback=TERMS)
    return job


def restart_daemon(job: Job) -> Node:
    """Restart the second node's daemon: its new relay knows of no order and of no answer."""
    restarted = make_job(armed=True).nodes[1]
    job.nodes = (job.nodes[0], restarted)
    return restarted


def call_stop(node: Node, identity: str = "0.1", now: float = 0.0) -> Case:
    """Fire a rule of this node that asks that all ranks leave; return its case."""
    fired = msgspec.structs.replace(case("NonFiniteLoss"), id=identity, first_seq=SIGN)
    node.relay.begin_agreed_stop(fired, now)
    return fired


def leave(job: Job) -> None:
    """Have all ranks get the commit, and say that they leave."""
    for node in job.nodes:
        node.promise()
    job.exchange()
    for node in job.nodes:
        node.restore()
        job.exchange()


def test_a_job_in_which_no_node_asks_for_a_stop_reports_nothing() -> None:
    job = make_job()
    job.exchange()
    assert [node.relay.report() for node in job.nodes] == [None, None]


def test_all_nodes_leave_at_one_step_and_each_knows_why() -> None:
    job = make_job()
    asked = call_stop(job.nodes[1])
    assert asked.done == ("stopping: asked of the job's coordinator",)
    job.exchange()
    assert not job.told(wire.Prepare), "where the ranks of the other node stand is not known yet"
    job.exchange()
    first, second = job.told(wire.Prepare)
    assert first == second
    assert (first.stops, first.to) == (True, -1)
    assert asked.done == ("stopping all ranks",), "no step is named before all ranks agreed to it"
    for node in job.nodes:
        node.promise()
    job.exchange()
    assert asked.done == (f"stopping all ranks at step {first.at}",)
    for node in job.nodes:
        node.restore()
        job.exchange()
    assert {commit.reason for commit in job.told(wire.Commit)} == {f"NonFiniteLoss: {asked.summary}"}
    assert asked.done == (f"stopped: all ranks ended training at the exit of step {first.at}",)
    assert [node.relay.agreed_stop_reason for node in job.nodes] == [f"NonFiniteLoss: {asked.summary}"] * 2
    assert [(o.ok, o.stops, o.at) for node in job.nodes for o in node.followed] == [(True, True, first.at)] * 2
    assert job.nodes[0].relay.done == ()
    job.restart_coordinator()
    late = call_stop(job.nodes[1], "0.2")
    job.exchange()
    assert late.done[-1].startswith("nothing: all ranks have ended training, by NonFiniteLoss")


def test_a_node_alone_stops_nothing() -> None:
    node = unarmed(1)
    node.relay.apart = APART
    asked = call_stop(node, now=3.0)
    for now in (3.0, 30.0):
        node.relay.tick(now)
        assert asked.done == (f"stopping: waits while {APART}",)
    assert node.failed == []
    node.relay.tick(3.0 + ASK_SECONDS + 1)
    assert asked.done == (f"not stopped: {APART}",)
    assert node.failed == [APART]
    unheard = unarmed(1)
    asked = call_stop(unheard)
    unheard.relay.tick(31.0)
    assert asked.done == ("not stopped: no word of the job's coordinator in 30 s",)
    assert node.link.messages == unheard.link.messages == []


def test_a_stop_that_is_asked_before_the_nodes_meet_is_done_once_they_do() -> None:
    job = make_job()
    for node in job.nodes:
        node.relay.apart = APART
    asked = call_stop(job.nodes[1], now=3.0)
    job.nodes[1].relay.tick(4.0)
    for node in job.nodes:
        node.relay.apart = ""
        node.relay.tick(7.0)
    assert asked.done == ("stopping: asked of the job's coordinator",)
    job.exchange(7.0)
    job.exchange(7.0)
    leave(job)
    assert asked.done[-1].startswith("stopped: all ranks ended training")


def test_a_stop_under_way_goes_on_after_another_coordinator_took_over() -> None:
    """The steps are long: the stop was requested more than half a minute before."""
    job = make_job()
    asked = call_stop(job.nodes[1])
    for now in (0.0, 1.0, 50.0):
        job.exchange(now)
    job.restart_coordinator()
    for node in job.nodes:
        node.relay.apart = "the coordinator is not heard"
        node.relay.tick(55.0)
    assert asked.done == ("stopping: waits while the coordinator is not heard",)
    for node in job.nodes:
        node.relay.apart = ""
    job.exchange(60.0)
    job.exchange(60.0)
    leave(job)
    assert asked.done[-1].startswith("stopped: all ranks ended training")


def test_where_no_orders_are_taken_a_stop_is_refused_and_not_waited_for() -> None:
    node = unarmed(1)
    early = call_stop(node)
    node.relay.no_orders = NO_ORDERS
    node.relay.tick(0.1)
    assert early.done == call_stop(node, "0.2").done == (f"not stopped: {NO_ORDERS}",)


def test_a_missing_node_is_named_and_no_rank_is_asked() -> None:
    job = make_job()
    asked = call_stop(job.nodes[0])
    job.exchange(silent=SILENT)
    job.exchange(ARRIVAL_SECONDS + 1, silent=SILENT)
    assert asked.done == (f"not stopped: node 1 {SILENT}",)
    assert job.nodes[0].failed == [f"node 1 {SILENT}"]
    assert not job.told(wire.Prepare)


def test_a_node_that_does_not_answer_in_time_means_none() -> None:
    job = make_job()
    asked, now = call_stop(job.nodes[0]), 0.0
    job.exchange(now)
    for _ in range(FRUITLESS + 2):
        job.exchange(now)
        if asked.done[-1].startswith("stopping"):
            job.nodes[0].promise()
        job.exchange(now)
        now += PREPARE_SECONDS + 10
    assert asked.done[-1].startswith("not stopped: no answer from rank 1 in")
    assert not job.told(wire.Commit)
    for node in job.nodes:
        asked_for = {prepare.id for prepare in node.told(wire.Prepare)}
        assert {abort.id for abort in node.told(wire.Abort)} == asked_for


def test_a_rank_that_cannot_leave_keeps_those_of_all_nodes() -> None:
    job = Job(unarmed(0), unarmed(1, takes_stop=False))
    asked = call_stop(job.nodes[0])
    job.exchange()
    job.exchange()
    assert "not stopped: rank 1 cannot leave at an agreed step" in asked.done[-1]
    assert "its training-sentinel (t)" in asked.done[-1]
    assert not job.told(wire.Prepare)


def test_a_rollback_that_is_possible_comes_first_and_a_spent_budget_ends_in_a_stop() -> None:
    job = make_job(armed=True)
    broken = None
    for round in range(TERMS.budget + 1):
        for node in job.nodes:
            node.stops_without_rollback = True
            broken = node.break_down(SIGN, identity=f"0.{round}")
        job.exchange()
        if round < TERMS.budget:
            leave(job)
    assert broken is not None
    assert "which is the budget" in broken.done[-1]
    assert not job.told(wire.Stop), "that would end the ranks with another status"
    for node in job.nodes:
        node.relay.begin_agreed_stop(node.cases[-1], 0.0)
    job.exchange()
    leave(job)
    assert broken.done[0].startswith("not rolled back: ")
    assert broken.done[-1].startswith("stopped: all ranks ended training")
    assert all(node.relay.agreed_stop_reason for node in job.nodes)


def test_a_daemon_that_is_restarted_after_a_rollback_asks_for_a_stop() -> None:
    job = make_job(armed=True)
    job.nodes[0].break_down()
    job.exchange()
    leave(job)
    assert [len(node.followed) for node in job.nodes] == [1, 1]
    restarted = restart_daemon(job)
    job.exchange()
    assert [node.relay.phase for node in job.nodes] == ["idle", "idle"]
    stop = StopAction(restarted.relay, restarted)
    stop.act_on(msgspec.structs.replace(case("NonFiniteLoss"), id="1.1"), 0.0)
    job.exchange()
    leave(job)
    assert all(node.relay.agreed_stop_reason for node in job.nodes)


def test_a_daemon_that_is_restarted_between_commit_and_step_waits_for_its_rank() -> None:
    job = make_job(armed=True)
    broken = job.nodes[0].break_down()
    job.exchange()
    for node in job.nodes:
        node.promise()
    job.exchange()
    promised = job.nodes[1].told(wire.Prepare)[0]
    restarted = restart_daemon(job)
    job.exchange()
    assert restarted.relay.phase == "restoring"
    for node in job.nodes:
        answer = wire.RolledBack(id=promised.id, ok=True, to=promised.to, at=promised.at, seconds=0.1)
        node.relay.add_restore_result(node.number, answer, 0.0)
    job.exchange()
    assert [len(node.followed) for node in job.nodes] == [1, 1]
    assert broken.state == "rolled_back"
    order = job.exchange()
    assert order is not None
    assert order.message is None
    assert [node.relay.phase for node in job.nodes] == ["idle", "idle"]


def test_a_rollback_on_a_node_where_none_is_armed_is_refused_with_its_name() -> None:
    job = make_job()
    zero = job.nodes[0]
    zero.rank.hello = msgspec.structs.replace(zero.rank.hello, rollback=TERMS)
    broken = zero.break_down()
    job.exchange()
    job.exchange()
    assert broken.done == ("not rolled back: node 1 has not armed rollback on all ranks",)


@pytest.mark.sampled(50)
@pytest.mark.parametrize("seed", range(200))
def test_no_commit_without_all_promises_and_no_rank_leaves_alone(seed: int) -> None:
    """Orders and reports are lost, the coordinator's daemon dies, ranks are late."""
    chance, job, over = random.Random(seed), make_job(), set[int]()
    loops = [Loop(node, chance) for node in job.nodes]
    asked = [call_stop(node) for node in job.nodes if node.number == seed % 2 or chance.random() < 0.5]
    for turn in range(120):
        calm = turn >= 40
        if not calm and chance.random() < 0.1:
            job.restart_coordinator()
        if calm or chance.random() < 0.8:
            job.exchange(float(turn), cut=() if calm else [n for n in (0, 1) if chance.random() < 0.3])
        for loop in loops:
            if not loop.restored and (calm or chance.random() < 0.7):
                loop.turn()
        vote(loops, over)
        for node in job.nodes:
            committed = {commit.id for commit in node.told(wire.Commit)}
            assert all(committed <= loop.promised for loop in loops)
    assert loops[0].restored == loops[1].restored
    assert len(loops[0].restored) <= 1
    assert [bool(node.relay.agreed_stop_reason) for node in job.nodes] == [bool(loops[0].restored)] * 2
    for one in asked:
        assert one.done[-1].startswith(("stopped: ", "not stopped: ", "nothing: all ranks have ended")), one.done
