"""The coordinator's side of the protocol: which nodes it hears, what it applied, what it asks for."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from sentinel import wire
from sentinel.cluster.protocol.blame import BlameLedger
from sentinel.cluster.protocol.election import COUNTED_SECONDS, TRIAL_SECONDS, find_leader, next_epoch
from sentinel.cluster.protocol.job_incident import JobIncident, JobIncidents, Page
from sentinel.cluster.protocol.messages import Beat, Events, NodeState, OpenIncident, Pulse, RollbackOrder
from sentinel.cluster.protocol.restart import JobMember, RestartOrders, find_proposed
from sentinel.diagnose.case import Case

SILENT_SECONDS = 10.0
"""Seconds without a pulse after which a node is silent: ten pulses are lost."""
GONE_SECONDS = 2.0
"""The same where the node's connection ended: a link that comes back does so in less."""
SETTLE_SECONDS = 5.0
"""Seconds for the nodes to hand in what they know before the first page: else the next coordinator would give an
incident a second id."""
ORPHAN_SECONDS = 60.0
"""Seconds until an earlier coordinator's page that no node knows of is closed; at once where all have been heard."""
ASK_SECONDS = 1.0
"""Seconds between two questions for the same events."""
BEAT_INCIDENTS = 1000
_ALL = wire.Members()


class KnownNode:
    """What the coordinator knows of a node."""

    def __init__(self, pulse: Pulse, now: float) -> None:
        self.applied = 0
        self.handed_out = 0
        """The last event that people know. Only up to it is acknowledged, so that a dying coordinator loses none."""
        self.pulse, self.heard = pulse, now
        self.gone = False
        """Whether its connection ended since its last pulse."""
        self.known: set[str] | None = set()
        """Ids of the cases that its daemon handed in since its start; None once it has handed in all."""
        self.asked = -math.inf
        """When it was last asked for events that have not come."""
        self.stamp = -math.inf
        """Stamp of our last beat that it followed."""
        self.bound: wire.JobReport | None = None
        """The report that binds the node furthest: by start, promise and acceptance."""
        self.completed = False
        """Whether its command has ended with status 0."""

    @property
    def counted_stamp(self) -> float:
        """Stamp of our last beat that it followed; infinite where its job ended while it was counted on, as it follows
        no other coordinator."""
        return math.inf if self.pulse.ended and self.heard - self.stamp < COUNTED_SECONDS else self.stamp

    def note_job(self, job: wire.JobReport | None) -> None:
        """Take the last report of its supervisor, which may have ended; the pulse may be an older one."""
        if job is None:
            return
        self.completed = self.completed or job.status == 0
        if self.bound is None or _order_job(job) >= _order_job(self.bound):
            self.bound = job

    def describe_job(self, now: float) -> JobMember:
        """Return the node's state for the decision on orders."""
        counted = now - self.stamp < COUNTED_SECONDS
        return JobMember(self.state(now), self.pulse.job, is_counted=counted, completed=self.completed)

    def state(self, now: float) -> NodeState:
        """Return the node's state for the beat."""
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

    def __init__(
        self, node: int, expected: int, epoch: int, now: float, pages: Iterable[Page] = (),
        members: wire.Members = _ALL, blame: BlameLedger | None = None, earlier: Iterable[NodeState] = (),
    ) -> None:  # fmt: skip
        """Start without nodes. `node`: the one with the role. `expected`: number of nodes of the job; `members`: which
        they are. `pages`: those that an earlier coordinator left open; `blame`: what it counted; `earlier`: the nodes
        as it knew them, its own among them."""
        self.node, self.expected, self.members = node, expected, members
        self.epoch = self._first_epoch = epoch
        self.incidents = JobIncidents(pages)
        self.blame = blame or BlameLedger()
        self._orders = RestartOrders(expected)
        self.nodes: dict[int, KnownNode] = {}
        """The nodes that were heard, by number, its own among them."""
        self._recalled = {one.node: _recall(one, now) for one in earlier if one.node != node and self.admits(one.node)}
        """Nodes that only an earlier coordinator has heard. They are described, and not counted on: if it died with its
        machine, others wait for the ranks there."""
        self._began = now
        self._settle_until = self._close_pages_at = -1.0
        """Set when it acts for the first time."""

    def is_acting(self, now: float) -> bool:
        """Whether it counts on more than half of the nodes: only then it tells people, and orders."""
        return now < self._find_acting_end()

    def explain_inaction(self, now: float) -> str:
        """Return the reason why it does not act at present."""
        counted = sum(now - known.stamp < COUNTED_SECONDS for known in self.nodes.values())
        return (
            f"this node would be the coordinator, but is in touch with only {counted} of {self.expected} nodes, itself "
            "included"
        )

    def has_failed(self, now: float) -> bool:
        """Whether it could not act for so long that another node must try."""
        return now > max(self._began, self._find_acting_end()) + TRIAL_SECONDS

    def admits(self, node: int) -> bool:
        """Whether the job has a node with this number."""
        return self.members.admits(node, self.expected)

    def yields_to(self, beat: Beat, now: float) -> bool:
        """Whether it gives the role up for the beat's sender: that acts, or neither does and it is the lower node."""
        return not self.is_acting(now) and (beat.acting or beat.node < self.node)

    def _find_acting_end(self) -> float:
        """Return the time until which it counts on more than half of the nodes, and on more than half of each group
        that may have agreed to go on without the others: another coordinator may already count on that group alone."""
        if not self.members.has(self.node):
            return -math.inf
        bound = [known.bound for known in self.nodes.values() if known.bound is not None]
        begun = {job.members.nodes for job in bound if job.members.start > self.members.start}
        groups = {self.members.nodes, *begun, *map(find_proposed, bound)}
        return min(map(self._find_majority_end, groups))

    def _find_majority_end(self, nodes: tuple[int, ...]) -> float:
        """Return the time until which it counts on more than half of these nodes. `nodes`: (): all."""
        among = (known.counted_stamp for node, known in self.nodes.items() if not nodes or node in nodes)
        stamps = sorted(among, reverse=True)
        needed = (len(nodes) or self.expected) // 2 + 1
        return stamps[needed - 1] + COUNTED_SECONDS if len(stamps) >= needed else -math.inf

    def _adopt(self, members: wire.Members, *, of_own_node: bool) -> None:
        """Take these as the job's members: a node has begun a start that they all agreed to. Others no longer count."""
        if not of_own_node and members.job not in ("", self.members.job):
            return  # node 0 shows which job it is, once it is heard
        self.members = msgspec.structs.replace(members, job=members.job or self.members.job)
        self.expected = members.count(self.expected)
        self._orders = RestartOrders(self.expected)
        self._recalled = {node: known for node, known in self._recalled.items() if members.has(node)}
        for node in [node for node in self.nodes if not members.has(node)]:
            del self.nodes[node]
            self.incidents.close_unknown(node, set(), f"node {node} was left out of the job")

    def _name_job(self, mark: str) -> None:
        """Take the mark of node 0's supervisor. If it had another, the job was started from its beginning: what was
        ordered, agreed to and counted in the former job is void.

        It is ignored once nodes have agreed on a start: `sentinel run` may have been started again on node 0 alone, and
        the agreement holds. If it was on all nodes, this node's supervisor has another mark, too, and its membership
        leaves the role. Until then no order of the former job is about a start of the next job: that is at start 0, and
        another start needs the end of all nodes, this one among them, or `PATIENCE_SECONDS`, after which a daemon
        without ranks has ended."""
        if not mark or mark == self.members.job or self.members.start:
            return
        if self.members.job:
            self._orders, self.blame = RestartOrders(self.expected), BlameLedger()
            for known in self.nodes.values():
                known.bound, known.completed = None, False
        self.members = msgspec.structs.replace(self.members, job=mark)

    def _is_of_other_job(self, job: wire.JobReport) -> bool:
        """Whether the report is of a former job under the same run id, whose daemon is still there or was cut off."""
        marks = [job.members.job, *(order.job for order in (job.accepted, job.begun) if order is not None)]
        return bool(self.members.job) and any(mark not in ("", self.members.job) for mark in marks)

    def take_pulse(self, pulse: Pulse, now: float) -> bool:
        """Take a node's pulse. Returns whether the state of its job or of a rollback changed."""
        if not self.admits(pulse.node):
            return False
        self._recalled.pop(pulse.node, None)
        known = self.nodes.get(pulse.node)
        is_present = known is None or pulse.incarnation >= known.pulse.incarnation
        if pulse.node == 0 and pulse.job is not None and is_present:
            self._name_job(pulse.job.mark)
        job = pulse.job or pulse.last_job
        if job is not None and self._is_of_other_job(job):
            job = None
        if job is not None and is_present and job.members.start > self.members.start:
            self._adopt(job.members, of_own_node=pulse.node == self.node)
        if (
            bound := max(pulse.epoch, job.promised if job is not None else 0)
        ) > self.epoch:  # its daemon or supervisor heard another coordinator, and heeds no lower epoch
            self.epoch = next_epoch(bound, self.node)
        before = (known.pulse.job, known.pulse.rollback) if known is not None else (None, None)
        if known is None or pulse.incarnation > known.pulse.incarnation:
            self.nodes[pulse.node] = fresh = KnownNode(pulse, now)
            fresh.note_job(known.bound if known is not None else None)
        elif pulse.incarnation == known.pulse.incarnation:
            newest = pulse if pulse.last >= known.pulse.last else known.pulse  # else it was delayed
            known.pulse, known.heard, known.gone = newest, now, False
        self.nodes[pulse.node].note_job(job)
        latest = self.nodes[pulse.node].pulse
        follows = self._first_epoch <= pulse.epoch and find_leader(pulse.epoch) == self.node
        if follows and pulse.stamp > now:  # of a forged beat, next to which all of this epoch are older
            if pulse.epoch == self.epoch:
                self.epoch = next_epoch(self.epoch, self.node)
        elif follows and pulse.incarnation == latest.incarnation:
            self.nodes[pulse.node].stamp = max(self.nodes[pulse.node].stamp, pulse.stamp)
        return (latest.job, latest.rollback) != before

    def take_events(self, events: Events) -> None:
        """Apply events of a node, if they follow the applied ones; otherwise the gap is asked for later."""
        known = self.nodes.get(events.node)
        if known is None or events.incarnation != known.pulse.incarnation or events.after > known.applied:
            return
        if events.upto <= known.applied and known.known is None:
            return
        for given in events.cases:
            if given.number > known.applied and given.of_job:
                self.incidents.add_page(given.case)
            elif given.number > known.applied:
                self.incidents.add(events.node, given)
                if known.known is not None:
                    known.known.add(given.case.id)
        if events.upto > known.applied:
            known.applied, known.asked = events.upto, -math.inf
        if known.known is not None and known.applied >= known.pulse.last:
            self.incidents.close_unknown(events.node, known.known, f"the daemon of node {events.node} was restarted")
            known.known = None

    def drop_node(self, node: int) -> None:
        """Note that a node's connection ended."""
        if node in self.nodes:
            self.nodes[node].gone = True

    def list_missing(self, now: float, among: Iterable[int] | None = None) -> list[tuple[int, int]]:
        """Return the nodes to ask for events that were not applied, each with the last event that was. `among`: only
        these nodes; None: all."""
        missing = []
        asked = self.nodes.keys() if among is None else self.nodes.keys() & set(among)
        for node in sorted(asked) if self.is_acting(now) else ():
            known = self.nodes[node]
            behind = known.applied < known.pulse.last or known.known is not None
            if behind and now - known.asked >= ASK_SECONDS:
                known.asked = now
                missing.append((node, known.applied))
        return missing

    def take_unexplained(self, now: float) -> list[JobIncident]:
        """Return the incidents for whose cause the ranks of all nodes must be asked, each once."""
        return self.incidents.take_unexplained() if self._has_settled(now) else []

    def take_changes(self, now: float, *, leaving: bool = False) -> list[Case]:
        """Return the changes since the last call of which people must hear, as cases of the job."""
        if not (self._has_settled(now) or (leaving and self.is_acting(now))):
            return []
        self._settle_until = 0.0
        changes = self.incidents.take_changes(leaving=leaving)
        present = max((known.pulse.attempt for known in self.nodes.values()), default=0)
        for case in changes:
            if case.attempt >= present:  # the pulses do not name the ranks of a former attempt
                self.blame.note(case.id, self._list_blamed(case))
        if leaving or not self.incidents.awaits_verdict:
            for known in self.nodes.values():
                known.handed_out = known.applied
        if self._has_caught_up() or now > self._close_pages_at:
            changes += self.incidents.close_pages(self._list_caught_up().union(self.members.left_out))
        return changes

    def take_folded(self, now: float) -> list[Case]:
        """Return the ends of incidents that people know and that are now another one; call after `take_changes`."""
        return self.incidents.take_folded() if self._has_settled(now) else []

    def _list_blamed(self, case: Case) -> tuple[int, ...]:
        """Return the nodes of the ranks that the cause names, else those of the incident; none for a consequence."""
        incident = self.incidents.find(case.id)
        if incident is None or case.parent:
            return ()
        named = {str(rank) for rank in case.diagnosis.ranks}
        every = sorted((self._recalled | self.nodes).items())
        nodes = tuple(node for node, known in every if not named.isdisjoint(known.pulse.ranks))
        return nodes or incident.nodes

    def _has_settled(self, now: float) -> bool:
        """Whether it acts, and has had the time to collect what the nodes know."""
        if not self.is_acting(now):
            return False
        if self._settle_until < 0.0:
            self._settle_until, self._close_pages_at = now + SETTLE_SECONDS, now + ORPHAN_SECONDS
        return now >= self._settle_until or self._has_caught_up()

    def _has_caught_up(self) -> bool:
        """Whether every node has handed in what it knows."""
        return len(self._list_caught_up()) >= self.expected

    def _list_caught_up(self) -> set[int]:
        return {node for node, known in self.nodes.items() if known.known is None}

    def list_nodes(self, now: float) -> tuple[NodeState, ...]:
        """Return the states of all nodes that were heard, by number; also of those that only an earlier coordinator
        heard."""
        return tuple(known.state(now) for _, known in sorted((self._recalled | self.nodes).items()))

    def order_nodes(self, now: float) -> wire.Order | None:
        """Return the order to all nodes; None: there is none."""
        if not self.is_acting(now):
            return None
        return self._orders.decide(self._list_members(now), now, self.epoch, self.blame.describe())

    def name_missing(self, now: float) -> str:
        """Name the nodes that are not heard, or have not ended a start that another node ended."""
        return self._orders.name_missing(self._list_members(now))

    def _list_members(self, now: float) -> list[JobMember]:
        recalled = [known.state(now) for known in self._recalled.values()]
        absent = [one if one.state == "left" else msgspec.structs.replace(one, state="silent") for one in recalled]
        return [JobMember(one, None) for one in absent] + [known.describe_job(now) for known in self.nodes.values()]

    def _find_present_members(self, now: float) -> wire.Members:
        """Return the members; all nodes where no supervisor has these: the job may be over, and be started again."""
        if not self.members.start:
            return self.members
        jobs = [member.job for member in self._list_members(now) if member.state.state == "alive"]
        has = any(job is not None and job.members.start >= self.members.start for job in jobs)
        return self.members if has else _ALL

    def make_beat(
        self, now: float, *, leaving: bool = False, order: wire.Order | None = None,
        rollback: RollbackOrder | None = None,
    ) -> Beat:  # fmt: skip
        """Return the message to all nodes."""
        acting = self.is_acting(now)
        return Beat(
            node=self.node,
            epoch=self.epoch,
            stamp=now,
            acting=acting,
            expected=self.expected,
            members=self._find_present_members(now),
            nodes=self.list_nodes(now),
            incidents=tuple(map(_outline, self.incidents.list_open()[-BEAT_INCIDENTS:])),
            leaving=leaving,
            order=order if acting else None,
            rollback=rollback if acting else None,
            blame={str(node): count for node, count in self.blame.counts.items() if count > 0},
            blamed_incidents=self.blame.incidents,
        )


def find_bound(pulse: Pulse) -> int:
    """Return the highest epoch that a node or its supervisor has heard: the node heeds no lower one."""
    job = pulse.job or pulse.last_job
    return max(pulse.epoch, job.promised if job is not None else 0)


def _recall(state: NodeState, now: float) -> KnownNode:
    """Return a node as an earlier coordinator knew it."""
    pulse = Pulse(
        node=state.node, incarnation=state.incarnation, hostname=state.hostname, attempt=state.attempt,
        step=state.step, ranks=state.ranks, work=state.work, leaving=state.state == "left",
    )  # fmt: skip
    return KnownNode(pulse, now - state.silent_seconds)


def _order_job(job: wire.JobReport) -> tuple[int, int, int]:
    return job.start, job.promised, job.accepted.epoch if job.accepted is not None else 0


def _outline(page: Page) -> OpenIncident:
    case = page.case
    return OpenIncident(
        id=case.id, attempt=case.attempt, alert=case.alert, nodes=page.nodes, severity=case.severity,
        problem_id=case.problem_id, first_step=case.first_step,
    )  # fmt: skip
