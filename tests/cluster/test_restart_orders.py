"""What a coordinator orders, given what the nodes report: pure decisions."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sentinel import wire
from sentinel.cluster.protocol.blame import BlameLedger
from sentinel.cluster.protocol.coordinator import Coordinator
from sentinel.cluster.protocol.election import next_epoch
from sentinel.cluster.protocol.messages import NodeState, Pulse
from sentinel.cluster.protocol.restart import PATIENCE_SECONDS, JobMember, RestartOrders, combine_faults


def fault(words: str = "RankLost", **more: Any) -> wire.JobFault:
    return wire.JobFault(kind=words, words=words, **more)


def member(
    node: int, fault: wire.JobFault | None = None, *, start: int = 0, state: Any = "alive", **more: Any
) -> JobMember:
    where = NodeState(
        node=node, hostname=f"host{node}", incarnation=1, applied=0, state=state, silent_seconds=12.0, attempt=0, step=0
    )
    return JobMember(where, wire.JobReport(start=start, fault=fault, **more))


def does(order: wire.Order | None) -> str:
    return order.does if order is not None else ""


@pytest.mark.parametrize(("nodes", "silent"), [(2, 1), (4, 2), (4, 3)])
def test_half_of_the_nodes_or_less_orders_nothing(nodes: int, silent: int) -> None:
    orders = RestartOrders(nodes)
    heard = [member(0, fault()), *(member(node) for node in range(1, nodes - silent))]
    absent = [member(node, state="silent") for node in range(nodes - silent, nodes)]
    for now in (0.0, PATIENCE_SECONDS + 1):
        assert orders.decide([*heard, *absent], now) is None
    assert f"node {nodes - 1} (host{nodes - 1}: silent for 12 s)" in orders.name_missing([*heard, *absent])


def test_more_than_half_end_and_stop_what_cannot_begin_again_and_say_without_whom() -> None:
    orders = RestartOrders(4)
    members = [member(0, fault()), member(1), member(2)]
    assert does(orders.decide(members, 0.0)) == "end"
    members = [member(0, fault()), member(1, fault("")), member(2, fault(""))]
    assert does(orders.decide(members, PATIENCE_SECONDS)) == "end"
    stop = orders.decide([*members, member(3, state="left")], PATIENCE_SECONDS + 1)
    assert stop is not None
    assert stop.does == "stop"
    assert stop.why == (
        "it ended (node 0 (host0): RankLost), and cannot begin again without node 3 (host3: its daemon has left)"
    )
    assert orders.decide([*members, member(3, fault(""))], PATIENCE_SECONDS + 2) == stop, "decided once"


def test_a_node_that_is_never_heard_and_one_without_a_supervisor_are_named() -> None:
    orders, bare = RestartOrders(4), JobMember(member(1).state, None)
    order = orders.decide([member(0, fault()), bare, member(2, fault(""))], 0.0)
    assert order is not None
    assert order.why == "waits for node 1 (host1: no `sentinel run` of its own), 1 node never heard"


def test_a_node_on_which_sentinel_run_alone_was_started_again_is_named() -> None:
    """As by a restart policy of its pod: the others, two restarts further, cannot begin without it."""
    begun = wire.Order(start=1, does="begin", fault=fault())
    orders = RestartOrders(3)
    members = [member(0, fault(), start=2, begun=begun), member(1, fault(), start=2, begun=begun), member(2)]
    assert orders.decide(members, 0.0) is None
    assert orders.name_missing(members) == (
        "node 2 (host2: its `sentinel run` was started again, and not on all nodes), "
        "node 0 (host0: its ranks are at a later start), node 1 (host1: its ranks are at a later start)"
    )


def test_all_begin_after_one_fault_and_the_order_stays_until_each_has() -> None:
    orders = RestartOrders(2)
    ended = [member(0, fault(""), attempt=3), member(1, fault(), attempt=4)]
    begin = orders.decide(ended, 0.0)
    assert begin is not None
    assert (begin.does, begin.start, begin.attempt) == ("begin", 0, 4)
    assert begin.fault == wire.JobFault(kind="RankLost", words="node 1 (host1): RankLost")
    assert orders.decide([member(0, start=1), ended[1]], 1.0) == begin
    assert orders.decide([member(0, fault(), start=1), ended[1]], 2.0) == begin, "who is behind is not left behind"
    assert orders.decide([member(0, start=1), member(1, start=1)], 3.0) is None
    again = orders.decide([member(0, fault(), start=1), member(1, start=1)], 100.0)
    assert again is not None
    assert (again.does, again.start) == ("end", 1)


def test_nodes_with_different_budgets_do_not_begin() -> None:
    order = RestartOrders(2).decide([member(0, fault(), restarts=3), member(1, fault(), restarts=1)], 0.0)
    assert order is not None
    assert (order.does, order.why) == ("stop", "the nodes have different --restarts: 1, 3")


def test_the_fault_is_the_alert_that_fired_first_and_the_first_sign_is_any_nodes() -> None:
    order = combine_faults(
        [
            member(0, fault("RuntimeError", step=231)),
            member(1, fault("Hang", step=230, time=20.0, sign=229)),
            member(2, fault("RankLost", step=228, time=10.0)),
            member(3, fault("", time=5.0)),
        ]
    )
    assert order == wire.JobFault(kind="RankLost", words="node 2 (host2): RankLost", step=231, sign=229, time=10.0)


def test_what_some_nodes_have_begun_the_next_coordinator_has_all_begin() -> None:
    """The former coordinator died before its order reached all nodes."""
    begun = wire.Order(start=0, does="begin", fault=fault("node 2: RankLost"), attempt=4, job="a")
    members = [member(0, start=1, begun=begun, mark="a"), member(1, start=1, begun=begun), member(2, fault())]
    for now in (0.0, PATIENCE_SECONDS + 1):
        assert RestartOrders(3).decide(members, now, 32) == msgspec.structs.replace(begun, epoch=32)
    members[0] = member(0, start=0, mark="another job's")
    assert does(RestartOrders(3).decide(members, 0.0)) == "end"


def test_an_order_of_a_former_job_does_not_reach_the_next_one_of_the_same_run_id() -> None:
    """The former job's daemons stay for a minute, the coordinator among them."""
    coordinator = Coordinator(0, 2, next_epoch(0, 0), 0.0, blame=BlameLedger({1: 3}, 3))

    def hear(mark: str, now: float, *, failed: bool) -> wire.Order | None:
        for node in range(2):
            job = wire.JobReport(fault=fault() if failed else None, restarts=3, mark=f"{mark}{node}")
            pulse = Pulse(
                node=node, incarnation=1, hostname="h", attempt=0, step=0, epoch=coordinator.epoch, stamp=now, job=job
            )
            coordinator.take_pulse(pulse, now)
        return coordinator.order_nodes(now)

    assert does(hear("former", 1.0, failed=True)) == "begin"
    assert hear("next", 2.0, failed=False) is None
    assert coordinator.make_beat(2.0).blame == {}
    assert does(hear("next", 3.0, failed=True)) == "begin"
