"""The coordinator's side of the protocol: whom it hears, what it applied, what it asks for. No network, no clock."""

from __future__ import annotations

from collections.abc import Iterable

from sentinel import wire
from sentinel.cluster.job_incident import JobIncident, JobIncidents
from sentinel.cluster.messages import Beat, Events, NodeCase, NodeState, OpenIncident, Pulse, RollbackOrder, trim_case
from sentinel.cluster.restart import JobMember, RestartOrders
from sentinel.diagnose.case import Case

SILENT_SECONDS = 10.0
"""Without a pulse: ten of them are lost."""
GONE_SECONDS = 2.0
"""The same where the connection ended: a link that comes back does so in less."""
SETTLE_SECONDS = 5.0
"""In which the nodes hand in what they know before the first page: a coordinator that was restarted would give an
incident a second id."""
ORPHAN_SECONDS = 60.0
"""After which a page of an earlier coordinator is closed that no node knows of; at once where all have been heard."""
ASK_SECONDS = 1.0
"""Between two questions for the same events."""
BEAT_INCIDENTS = 1000


class KnownNode:
    """What the coordinator knows of a node."""

    def __init__(self, pulse: Pulse, now: float) -> None:
        self.applied = 0
        self.handed_out = 0
        """The last event of which people know: what is acknowledged, or a coordinator that dies takes it along."""
        self.pulse, self.heard = pulse, now
        self.gone = False
        """Whether its connection ended since its last pulse."""
        self.known: set[str] | None = set()
        """Cases that its daemon handed in since its start; None once it has handed in all."""
        self.asked = -ASK_SECONDS

    def state(self, now: float) -> NodeState:
        """For the beat."""
        pulse, silent = self.pulse, now - self.heard
        is_silent = silent > (GONE_SECONDS if self.gone else SILENT_SECONDS)
        return NodeState(
            node=pulse.node,
            hostname=pulse.hostname,
            incarnation=pulse.incarnation,
            applied=self.handed_out,
            state="left" if pulse.leaving else "silent" if is_silent else "alive",
            silent_seconds=silent,
            attempt=pulse.attempt,
            step=pulse.step,
            ranks=pulse.ranks,
            work=pulse.work,
        )


class Coordinator:
    """Applies each node's events once, in order, and makes the job's incidents of them."""

    def __init__(self, node: int, expected: int, epoch: int, now: float, pages: Iterable[Case] = ()) -> None:
        """`node`: the one whose daemon has the role. `expected`: nodes of the job. `pages`: what an earlier one told
        people of, and not that it is over."""
        self.node, self.expected, self.epoch = node, expected, epoch
        self.incidents = JobIncidents(pages)
        self.orders = RestartOrders(expected)
        self.nodes: dict[int, KnownNode] = {}
        """The others, by number."""
        self._settle_until, self._close_pages_at = now + SETTLE_SECONDS, now + ORPHAN_SECONDS

    def record(self, case: Case) -> None:
        """A case of its own node changed."""
        self.incidents.add(self.node, NodeCase(number=0, case=trim_case(case)))

    def take_pulse(self, pulse: Pulse, now: float) -> bool:
        """A node is there. Returns whether its job, or a rollback, stands otherwise than before."""
        if pulse.node == self.node:
            return False  # a node that has our number: its events would be taken for ours
        if pulse.epoch > self.epoch:  # the clock was set back before this start
            self.epoch = pulse.epoch + 1
        known = self.nodes.get(pulse.node)
        before = (known.pulse.job, known.pulse.rollback) if known is not None else (None, None)
        if known is None or pulse.incarnation > known.pulse.incarnation:
            self.nodes[pulse.node] = KnownNode(pulse, now)
        elif pulse.incarnation == known.pulse.incarnation:
            newest = pulse if pulse.last >= known.pulse.last else known.pulse  # a delayed one
            known.pulse, known.heard, known.gone = newest, now, False
        latest = self.nodes[pulse.node].pulse
        return (latest.job, latest.rollback) != before

    def take_events(self, events: Events) -> None:
        """Events of a node: applied if they follow what was, else asked for."""
        known = self.nodes.get(events.node)
        if known is None or events.incarnation != known.pulse.incarnation or events.after > known.applied:
            return
        if events.upto <= known.applied and known.known is None:
            return
        for given in events.cases:
            if given.number > known.applied:
                self.incidents.add(events.node, given)
                if known.known is not None:
                    known.known.add(given.case.id)
        known.applied = max(known.applied, events.upto)
        if known.known is not None and known.applied >= known.pulse.last:
            self.incidents.close_unknown(events.node, known.known)
            known.known = None

    def drop_node(self, node: int) -> None:
        """A node's connection ended."""
        if node in self.nodes:
            self.nodes[node].gone = True

    def list_missing(self, now: float) -> list[tuple[int, int]]:
        """Nodes that have events which were not applied, and the last event that was."""
        missing = []
        for node, known in self.nodes.items():
            behind = known.applied < known.pulse.last or known.known is not None
            if behind and now - known.asked >= ASK_SECONDS:
                known.asked = now
                missing.append((node, known.applied))
        return missing

    def take_unexplained(self, now: float) -> list[JobIncident]:
        """Incidents whose cause the ranks of all nodes are to be asked for, each once."""
        return self.incidents.take_unexplained() if self._has_settled(now) else []

    def take_changes(self, now: float, *, leaving: bool = False) -> list[Case]:
        """What people are to know, as cases of the job."""
        if not (self._has_settled(now) or leaving):
            return []
        self._settle_until = 0.0
        changes = self.incidents.take_changes(leaving=leaving)
        if leaving or not self.incidents.awaits_verdict:
            for known in self.nodes.values():
                known.handed_out = known.applied
        if self._has_caught_up() or now > self._close_pages_at:
            changes += self.incidents.close_pages()
        return changes

    def _has_settled(self, now: float) -> bool:
        return now >= self._settle_until or self._has_caught_up()

    def _has_caught_up(self) -> bool:
        """Whether every node has handed in what it knows."""
        return sum(known.known is None for known in self.nodes.values()) >= self.expected - 1

    def list_nodes(self, now: float) -> tuple[NodeState, ...]:
        """The other nodes, by number."""
        return tuple(known.state(now) for _, known in sorted(self.nodes.items()))

    def order_nodes(self, own: JobMember, now: float) -> wire.Order | None:
        """What all nodes are to do now, this one with them."""
        return self.orders.decide(self._list_members(own, now), now)

    def name_missing(self, own: JobMember, now: float) -> str:
        """The nodes that are not heard, or have not ended what another ended."""
        return self.orders.name_missing(self._list_members(own, now))

    def _list_members(self, own: JobMember, now: float) -> list[JobMember]:
        return [own, *(JobMember(known.state(now), known.pulse.job) for known in self.nodes.values())]

    def make_beat(
        self, own: NodeState, now: float, *, leaving: bool = False, order: wire.Order | None = None,
        rollback: RollbackOrder | None = None,
    ) -> Beat:  # fmt: skip
        """What all nodes are to know."""
        firing = [one for one in self.incidents if one.firing][-BEAT_INCIDENTS:]
        return Beat(
            epoch=self.epoch,
            expected=self.expected,
            nodes=(own, *self.list_nodes(now)),
            incidents=tuple(
                OpenIncident(id=one.id, attempt=one.attempt, alert=one.alert, nodes=one.nodes) for one in firing
            ),
            leaving=leaving,
            order=order,
            rollback=rollback,
        )
