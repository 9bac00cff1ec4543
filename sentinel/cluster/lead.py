"""What a node does while it is its job's coordinator: hear the nodes, give orders, judge steps and notify people.

It is discarded with the role. The next coordinator rebuilds what it needs from what the nodes know.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from sentinel import wire
from sentinel.cluster.local_run import JobJudge, LocalRun
from sentinel.cluster.orders import NodeOrders
from sentinel.cluster.protocol.blame import BlameLedger
from sentinel.cluster.protocol.coordinator import Coordinator, find_bound
from sentinel.cluster.protocol.election import check_epoch, check_incarnation
from sentinel.cluster.protocol.job_incident import Page
from sentinel.cluster.protocol.messages import Beat, Digest, Events, OpenIncident, Pulse, RollbackOrder, decode
from sentinel.cluster.protocol.relay import RelayedRollback
from sentinel.cluster.protocol.rollback import JobRollbacks
from sentinel.cluster.protocol.silence_notices import SilenceNotices
from sentinel.diagnose.case import Case
from sentinel.diagnose.evidence import Finding
from sentinel.errors import ProtocolError
from sentinel.notify.notifier import Notifier
from sentinel.runs import Run

log = logging.getLogger(__name__)


class Lead:
    """The coordinator's role of this node, for one run."""

    def __init__(
        self,
        run: Run,
        notifier: Notifier,
        local: LocalRun,
        orders: NodeOrders,
        coordinator: Coordinator,
        said: set[str],
    ) -> None:
        """`said`: the lines on the training terminal that are not repeated."""
        self._run, self._notifier, self._local, self._orders = run, notifier, local, orders
        self.coordinator = coordinator
        self.judge: JobJudge | None = None
        """Judge of all nodes' steps; set by the membership when the coordinator acts for the first time."""
        self._rollbacks: JobRollbacks | None = None
        """Rollbacks of the present attempt."""
        self._order: wire.Order | None = None
        self._rollback_order: RollbackOrder | None = None
        self._said = said
        self._silences = SilenceNotices()
        self._silenced: dict[str, Case] = {}
        """The job's open incidents by id, as they were last put into the pipeline."""

    def take(self, kind: str, node: int, payload: bytes, now: float) -> bool:
        """Take a message of another node. Returns whether there may be news for people and all nodes. Raises
        ProtocolError."""
        if kind == "gone":
            self.coordinator.drop_node(node)
            return False
        if not self.coordinator.admits(node):
            expected = self.coordinator.expected
            raise ProtocolError(
                f"node {node} is not one of this job's {expected} nodes: each must have the same number of ranks"
            )
        if kind == "pulse":
            pulse: Pulse = _check_sender(decode(payload, Pulse), node)
            check_epoch(find_bound(pulse), time.time())
            check_incarnation(pulse.incarnation, time.time())
            return self.coordinator.take_pulse(pulse, now) and self.decide(now)
        if kind == "digest":
            digest = _check_sender(decode(payload, Digest), node)
            if self.judge is not None:
                self.judge.take_digest(digest, now)
            return False
        self.coordinator.take_events(_check_sender(decode(payload, Events), node))
        return True

    def decide(self, now: float) -> bool:
        """Decide on the orders to the nodes. Returns whether they changed."""
        before, relay = (self._order, self._rollback_order), self._orders.find_relay()
        self._order = self.coordinator.order_nodes(now)
        if relay is not None and self.coordinator.is_acting(now):
            self._decide_rollback(relay, now)
        return (self._order, self._rollback_order) != before

    def make_beat(self, now: float, *, leaving: bool = False) -> Beat:
        """Return the message to all nodes: their states, the open incidents and the orders."""
        beat = self.coordinator.make_beat(now, leaving=leaving, order=self._order, rollback=self._rollback_order)
        reached = self.judge.list_reached() if self.judge is not None else {}
        return msgspec.structs.replace(beat, digested={str(node): upto for node, upto in reached.items()})

    def tick(self, now: float) -> None:
        """Have the steps judged, notify people, and say on the terminal which nodes met or fell silent. Called once a
        second."""
        if self.judge is not None:
            self.judge.tick(now)
        self.tell(now)
        states, nodes = self.coordinator.list_nodes(now), self.coordinator.expected
        heard = self.coordinator.nodes
        if "met" not in self._said and sum(one.state == "alive" and one.node in heard for one in states) == nodes:
            self._said.add("met")
            self._local.tell(f"all {nodes} nodes of the job have met")
        for line in self._silences.describe_changes(states):
            self._local.tell(line)

    def tell(self, now: float, *, ending: bool = False) -> bool:
        """Notify people of the job's incidents that changed, and of those for which a silence began or ended. `ending`:
        the run is over. Returns whether any changed: the other nodes must know before this one can die."""
        if not self.coordinator.is_acting(now):
            return False
        for incident in self.coordinator.take_unexplained(now):
            self._local.find_cause(self.coordinator.incidents, incident)
        changed = self.coordinator.take_changes(now, leaving=ending)
        fresh = {case.id for case in changed}
        for case in [*changed, *(case for case in self._silenced.values() if case.id not in fresh)]:
            silence = self._notifier.silences.find_silence(case)
            if case.id in fresh or silence != case.silenced:
                case = msgspec.structs.replace(case, silenced=silence)
                self._notifier.pipeline.put(case)
                self._silenced[case.id] = case
                self._record(case)
            if case.state != "firing":
                self._silenced.pop(case.id, None)
        for case in self.coordinator.take_folded(now):
            self._notifier.pipeline.put(case, moved=True)
            self._silenced.pop(case.id, None)
            self._record(case)
        return bool(changed)

    def _record(self, case: Case) -> None:
        incident = self.coordinator.incidents.find(case.id)
        cases = incident.cases if incident is not None else ()
        own = [identity for node, identity in cases if node == self.coordinator.node]
        self._local.record_job_incident(case, own)

    def _decide_rollback(self, relay: RelayedRollback, now: float) -> None:
        number, nodes = self._run.attempt.number, self.coordinator.expected
        if self._rollbacks is None or self._rollbacks.attempt != number:
            self._rollbacks = JobRollbacks(number, self._local.identity, nodes, relay.done, relay.agreed_stop_reason)
        job = self._rollbacks
        for state in self.coordinator.list_nodes(now):
            known = self.coordinator.nodes.get(state.node)
            job.take_node(state, known.pulse.rollback if known is not None else None, now)
        job.advance(now)
        if job.armed and (key := f"armed {number}") not in self._said:
            self._said.add(key)
            self._local.tell(f"all {nodes} nodes have met: rollback is armed on all ranks")
        self._rollback_order = job.make_order()


def restore_pages(incidents: Iterable[OpenIncident], run: str, run_id: str) -> list[Page]:
    """Return the open incidents of an earlier coordinator's last beat: enough to end them under their known keys."""
    return [
        Page(
            Case(
                id=one.id, run=run, run_id=run_id, attempt=one.attempt, alert=one.alert, severity=one.severity,
                problem_id=one.problem_id, state="firing", first_step=one.first_step, first_seq=one.first_step,
                step=one.first_step, time=time.time(), members=(), summary=one.alert,
                diagnosis=Finding(cause="", confidence="none"), told=True,
            ),
            one.nodes,
        )
        for one in incidents
    ]  # fmt: skip


def restore_blame(beat: Beat) -> BlameLedger:
    """Return the incidents per node that an earlier coordinator counted, from its last beat."""
    counts = {int(node): count for node, count in beat.blame.items() if node.isdecimal()}
    return BlameLedger(counts, beat.blamed_incidents, [one.id for one in beat.incidents])


def _check_sender(message: Pulse | Events | Digest, node: int) -> Any:
    if message.node != node:
        raise ProtocolError(f"node {node} says that it is node {message.node}")
    return message
