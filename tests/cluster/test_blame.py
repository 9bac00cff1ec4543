"""The number of a job's incidents in which each node was: how the coordinator counts it and hands it on."""

from __future__ import annotations

import msgspec

from sentinel import wire
from sentinel.cli import job_status
from sentinel.cluster.lead import restore_blame
from sentinel.cluster.protocol.blame import REMEMBERED, BlameLedger
from sentinel.cluster.protocol.coordinator import Coordinator
from sentinel.cluster.protocol.messages import Events, NodeCase, Pulse, decode, encode
from sentinel.cluster.protocol.restart import RestartOrders
from sentinel.diagnose.case import Case
from sentinel.diagnose.evidence import Finding
from tests.cluster.simulation import make_case
from tests.cluster.test_job_causes import EPOCH, hang, lost
from tests.cluster.test_restart_orders import fault, member

NODES = 4


class CountedJob:
    """A coordinator of four nodes with two ranks each, to which the test hands cases of nodes."""

    def __init__(self, blame: BlameLedger | None = None) -> None:
        self.coordinator = Coordinator(0, NODES, EPOCH, 0.0, blame=blame)
        self._last = dict.fromkeys(range(NODES), 0)
        for node in range(NODES):
            self.beat(node)
            self.coordinator.take_events(Events(node=node, incarnation=1, after=0, upto=0))

    def hand_in(self, node: int, *cases: Case) -> None:
        """Hand in cases of a node, of which people hear at once."""
        for case in cases:
            after = self._last[node]
            self._last[node] += 1
            given = NodeCase(number=after + 1, case=case)
            events = Events(node=node, incarnation=1, after=after, upto=after + 1, cases=(given,))
            self.coordinator.take_events(events)
        self.coordinator.take_changes(1.0)

    def count(self) -> tuple[dict[str, int], int]:
        """Return the incidents by node and in all, as all nodes hear them."""
        beat = self.coordinator.make_beat(1.0)
        return beat.blame, beat.blamed_incidents

    def beat(self, node: int, attempt: int = 0) -> None:
        """Send a pulse of a node whose ranks have all said hello in the first attempt, and none in another one."""
        ranks = {str(2 * node): 5, str(2 * node + 1): 5} if attempt == 0 else {}
        pulse = Pulse(
            node=node, incarnation=1, hostname="h", attempt=attempt, step=5, ranks=ranks, epoch=EPOCH, stamp=0.0
        )
        self.coordinator.take_pulse(pulse, 0.0)


def test_a_node_counts_once_for_each_incident_and_not_for_consequences() -> None:
    job = CountedJob()
    job.hand_in(3, lost(1))
    for node in range(3):
        job.hand_in(node, hang(2))
    assert job.count() == ({"3": 1}, 1)
    job.hand_in(1, make_case(3, "LossSpike", 500))
    job.hand_in(2, make_case(3, "LossSpike", 500))
    job.hand_in(1, msgspec.structs.replace(make_case(3, "LossSpike", 500), state="resolved", resolved_step=510))
    assert job.count() == ({"3": 1, "1": 1, "2": 1}, 2)


def test_in_a_hang_of_all_nodes_only_the_node_that_its_cause_names_counts() -> None:
    job = CountedJob()
    for node in range(NODES):
        job.hand_in(node, hang(1))
    assert job.count() == ({"0": 1, "1": 1, "2": 1, "3": 1}, 1)
    (incident,) = job.coordinator.incidents
    job.coordinator.incidents.explain(incident, Finding("rank 5 never came", "high", ranks=(5,)))
    job.coordinator.take_changes(1.0)
    assert job.count() == ({"2": 1}, 1)


def test_a_restart_moves_the_blame_of_a_hang_to_no_other_node() -> None:
    job = CountedJob()
    named = msgspec.structs.replace(hang(1), diagnosis=Finding("rank 5 never came", "high", ranks=(5,)))
    for node in range(NODES):
        job.hand_in(node, named)
    assert job.count() == ({"2": 1}, 1)
    for node in range(NODES):
        job.beat(node, attempt=1)
        job.hand_in(node, msgspec.structs.replace(named, state="resolved", resolved_step=100))
    assert job.count() == ({"2": 1}, 1)


def test_the_next_coordinator_goes_on_counting_and_counts_what_is_open_once() -> None:
    job = CountedJob()
    job.hand_in(1, lost(1), make_case(2, "LossSpike", 200))
    beat = job.coordinator.make_beat(1.0)
    beat = decode(encode(beat), type(beat))
    successor = CountedJob(restore_blame(beat))
    successor.hand_in(1, lost(1), make_case(2, "LossSpike", 200), make_case(3, "GradSpike", 300))
    assert successor.count() == ({"1": 3}, 3)


def test_the_node_of_most_incidents_is_named_where_an_attempt_ends_and_in_status() -> None:
    ledger = BlameLedger()
    for number, nodes in enumerate([(1,), (1,), (1, 2), (1,), (3,), ()]):
        ledger.note(f"n1-0.{number}", nodes)
    words = ledger.describe()
    assert words == "node 1 was in 4 of 5 incidents"
    order = RestartOrders(2).decide([member(0, fault("")), member(1, fault())], 0.0, blame=words)
    assert order is not None
    assert order.fault == wire.JobFault(kind="RankLost", words=f"node 1 (host1): RankLost; {words}")
    job = {"blame": {"1": 4}, "blamed_incidents": 5, "view": "joined", "node": 0}
    node = {"node": 1, "hostname": "host1", "state": "alive", "silent_seconds": 0.0, "step": 7}
    assert job_status.describe_node(job, node) == "host1, alive, step 7, was in 4 of 5 incidents"
    assert job_status.describe_node({"view": "joined", "node": 0}, node) == "host1, alive, step 7"


def test_no_node_is_named_that_does_not_stand_out() -> None:
    for incidents in ([(1,)], [(1, 2), (1, 2)], [(1,), (1,), (2,), (3,)]):
        ledger = BlameLedger()
        for number, nodes in enumerate(incidents):
            ledger.note(str(number), nodes)
        assert ledger.describe() == ""


def test_old_incidents_stay_counted_when_they_are_forgotten() -> None:
    ledger = BlameLedger()
    for number in range(2 * REMEMBERED):
        ledger.note(str(number), (1,))
        ledger.note(str(number), (2,))
    assert (ledger.counts[1], ledger.counts[2], ledger.incidents) == (0, 2 * REMEMBERED, 2 * REMEMBERED)
