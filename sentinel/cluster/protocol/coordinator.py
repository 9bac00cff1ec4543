"""The coordinator's side of the protocol: whom it hears, what it applied, what it asks for."""

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
"""Without a pulse: ten of them are lost."""
GONE_SECONDS = 2.0
"""The same where the connection ended: a link that comes back does so in less."""
SETTLE_SECONDS = 5.0
"""In which the nodes hand in what they know before the first page: the next coordinator would give an incident a second
id."""
ORPHAN_SECONDS = 60.0
"""After which a page of an earlier coordinator is closed that no node knows of; at once where all have been heard."""
ASK_SECONDS = 1.0
"""Between two questions for the same events."""
BEAT_INCIDENTS = 1000
_ALL = wire.Members()


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
        self.asked = -math.inf
        """When it was asked for events that have not come."""
        self.stamp = -math.inf
        """Of our last beat that it followed."""
        self.bound: wire.JobReport | None = None
        """The report that binds it furthest."""
        self.completed = False
        """Whether its command came to its end well."""

    @property
    def counted_stamp(self) -> float:
        """Of our last beat that it followed; without an end where its job ended while it was counted on: it follows no
        other coordinator."""
        return math.inf if self.pulse.ended and self.heard - self.stamp < COUNTED_SECONDS else self.stamp

    def note_job(self, job: wire.JobReport | None) -> None:
        """What its supervisor said last, be it gone; of an older pulse, maybe."""
        if job is None:
            return
        self.completed = self.completed or job.status == 0
        if self.bound is None or _order_job(job) >= _order_job(self.bound):
            self.bound = job

    def describe_job(self, now: float) -> JobMember:
        """For orders."""
        counted = now - self.stamp < COUNTED_SECONDS
        return JobMember(self.state(now), self.pulse.job, is_counted=counted, completed=self.completed)

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

    def __init__(
        self, node: int, expected: int, epoch: int, now: float, pages: Iterable[Page] = (),
        members: wire.Members = _ALL, blame: BlameLedger | None = None,
    ) -> None:  # fmt: skip
        """`node`: the one whose daemon has the role. `expected`: nodes of the job, and `members`, which they are.
        `pages`: what an earlier one told people of, and not that it is over; `blame`: what it counted."""
        self.node, self.expected, self.members = node, expected, members
        self.epoch = self._first_epoch = epoch
        self.incidents = JobIncidents(pages)
        self.blame = blame or BlameLedger()
        self._orders = RestartOrders(expected)
        self.nodes: dict[int, KnownNode] = {}
        """By number, its own among them."""
        self._began = now
        self._settle_until = self._close_pages_at = -1.0
        """Set when it acts for the first time."""

    def is_acting(self, now: float) -> bool:
        """Whether it counts on more than half of the nodes: only then it tells people, and orders."""
        return now < self._find_acting_end()

    def explain_inaction(self, now: float) -> str:
        """Why it does not act, where it does not."""
        counted = sum(now - known.stamp < COUNTED_SECONDS for known in self.nodes.values())
        return (
            f"this node would be the coordinator, but is in touch with only {counted} of {self.expected} nodes, itself "
            "included"
        )

    def has_failed(self, now: float) -> bool:
        """Whether it cannot act for so long that another one is to try."""
        return now > max(self._began, self._find_acting_end()) + TRIAL_SECONDS

    def admits(self, node: int) -> bool:
        """Whether the job has a node with this number."""
        return self.members.admits(node, self.expected)

    def yields_to(self, beat: Beat, now: float) -> bool:
        """Whether this one gives the role up for another: one that acts, or where neither does, the lower node."""
        return not self.is_acting(now) and (beat.acting or beat.node < self.node)

    def _find_acting_end(self) -> float:
        """Until when it counts on more than half of the nodes; and of those that may have been agreed on to go on
        without the others: it does not know whether another coordinator already counts on these alone."""
        if not self.members.has(self.node):
            return -math.inf
        bound = [known.bound for known in self.nodes.values() if known.bound is not None]
        begun = {job.members.nodes for job in bound if job.members.start > self.members.start}
        groups = {self.members.nodes, *begun, *map(find_proposed, bound)}
        return min(map(self._find_majority_end, groups))

    def _find_majority_end(self, nodes: tuple[int, ...]) -> float:
        """`nodes`: (): all."""
        among = (known.counted_stamp for node, known in self.nodes.items() if not nodes or node in nodes)
        stamps = sorted(among, reverse=True)
        needed = (len(nodes) or self.expected) // 2 + 1
        return stamps[needed - 1] + COUNTED_SECONDS if len(stamps) >= needed else -math.inf

    def _adopt(self, members: wire.Members, *, of_own_node: bool) -> None:
        """A node has begun a start with these: all of them agreed to that before. Others count no more."""
        if not of_own_node and members.job not in ("", self.members.job):
            return  # whose job that is shows once node 0 is heard
        self.members = msgspec.structs.replace(members, job=members.job or self.members.job)
        self.expected = members.count(self.expected)
        self._orders = RestartOrders(self.expected)
        for node in [node for node in self.nodes if not members.has(node)]:
            del self.nodes[node]
            self.incidents.close_unknown(node, set(), f"node {node} was left out of the job")

    def _name_job(self, mark: str) -> None:
        """Node 0's supervisor has this mark. Where it had another, the job was started from its beginning: what was
        ordered, agreed to and counted in the former one holds no more.

        Not so once nodes have agreed on a start: `sentinel run` may have been started again on node 0 alone, and the
        agreement holds. If all were, this node's supervisor has another mark, too, and its membership leaves the role.
        Before that no order of the former job is about a start of the next one: that is at start 0, and to begin
        another takes the end of all nodes, this one among them, or `PATIENCE_SECONDS`, after which a daemon without
        ranks is gone."""
        if not mark or mark == self.members.job or self.members.start:
            return
        if self.members.job:
            self._orders, self.blame = RestartOrders(self.expected), BlameLedger()
            for known in self.nodes.values():
                known.bound, known.completed = None, False
        self.members = msgspec.structs.replace(self.members, job=mark)

    def _is_of_other_job(self, job: wire.JobReport) -> bool:
        """Whether it is of a former job under the same run id, of which a daemon is left, or was cut off."""
        marks = [job.members.job, *(order.job for order in (job.accepted, job.begun) if order is not None)]
        return bool(self.members.job) and any(mark not in ("", self.members.job) for mark in marks)

    def take_pulse(self, pulse: Pulse, now: float) -> bool:
        """A node is there. Returns whether its job, or a rollback, stands otherwise than before."""
        if not self.admits(pulse.node):
            return False
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
        ) > self.epoch:  # its daemon, or its supervisor, heard another one: it heeds none of a lower epoch
            self.epoch = next_epoch(bound, self.node)
        before = (known.pulse.job, known.pulse.rollback) if known is not None else (None, None)
        if known is None or pulse.incarnation > known.pulse.incarnation:
            self.nodes[pulse.node] = fresh = KnownNode(pulse, now)
            fresh.note_job(known.bound if known is not None else None)
        elif pulse.incarnation == known.pulse.incarnation:
            newest = pulse if pulse.last >= known.pulse.last else known.pulse  # a delayed one
            known.pulse, known.heard, known.gone = newest, now, False
        self.nodes[pulse.node].note_job(job)
        latest = self.nodes[pulse.node].pulse
        follows = self._first_epoch <= pulse.epoch and find_leader(pulse.epoch) == self.node
        if follows and pulse.stamp > now:  # of a forged beat, beside which all of this epoch are older
            if pulse.epoch == self.epoch:
                self.epoch = next_epoch(self.epoch, self.node)
        elif follows and pulse.incarnation == latest.incarnation:
            self.nodes[pulse.node].stamp = max(self.nodes[pulse.node].stamp, pulse.stamp)
        return (latest.job, latest.rollback) != before

    def take_events(self, events: Events) -> None:
        """Events of a node: applied if they follow what was, else asked for."""
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
        """A node's connection ended."""
        if node in self.nodes:
            self.nodes[node].gone = True

    def list_missing(self, now: float, among: Iterable[int] | None = None) -> list[tuple[int, int]]:
        """Nodes that have events which were not applied, and the last event that was: those to ask. `among`: only of
        these; None: of all."""
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
        """Incidents whose cause the ranks of all nodes are to be asked for, each once."""
        return self.incidents.take_unexplained() if self._has_settled(now) else []

    def take_changes(self, now: float, *, leaving: bool = False) -> list[Case]:
        """What people are to know, as cases of the job."""
        if not (self._has_settled(now) or (leaving and self.is_acting(now))):
            return []
        self._settle_until = 0.0
        changes = self.incidents.take_changes(leaving=leaving)
        present = max((known.pulse.attempt for known in self.nodes.values()), default=0)
        for case in changes:
            if case.attempt >= present:  # of a former attempt, the pulses name the ranks no more
                self.blame.note(case.id, self._list_blamed(case))
        if leaving or not self.incidents.awaits_verdict:
            for known in self.nodes.values():
                known.handed_out = known.applied
        if self._has_caught_up() or now > self._close_pages_at:
            changes += self.incidents.close_pages(self._list_caught_up().union(self.members.left_out))
        return changes

    def take_folded(self, now: float) -> list[Case]:
        """Ends of incidents that people were told of, and that are another one by now; after `take_changes`."""
        return self.incidents.take_folded() if self._has_settled(now) else []

    def _list_blamed(self, case: Case) -> tuple[int, ...]:
        """The nodes of the ranks that its cause names, else those that it is on; of a consequence, none."""
        incident = self.incidents.find(case.id)
        if incident is None or case.parent:
            return ()
        named = {str(rank) for rank in case.diagnosis.ranks}
        nodes = tuple(node for node, known in sorted(self.nodes.items()) if not named.isdisjoint(known.pulse.ranks))
        return nodes or incident.nodes

    def _has_settled(self, now: float) -> bool:
        """Whether it acts, and had the time to collect what the nodes know."""
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
        """All that were heard, by number."""
        return tuple(known.state(now) for _, known in sorted(self.nodes.items()))

    def order_nodes(self, now: float) -> wire.Order | None:
        """What all nodes are to do now."""
        if not self.is_acting(now):
            return None
        return self._orders.decide(self._list_members(now), now, self.epoch, self.blame.describe())

    def name_missing(self, now: float) -> str:
        """The nodes that are not heard, or have not ended what another ended."""
        return self._orders.name_missing(self._list_members(now))

    def _list_members(self, now: float) -> list[JobMember]:
        return [known.describe_job(now) for known in self.nodes.values()]

    def _find_present_members(self, now: float) -> wire.Members:
        """Those that a supervisor has now: the job that had these may be over, and be started again with all nodes."""
        if not self.members.start:
            return self.members
        jobs = [member.job for member in self._list_members(now) if member.state.state == "alive"]
        has = any(job is not None and job.members.start >= self.members.start for job in jobs)
        return self.members if has else _ALL

    def make_beat(
        self, now: float, *, leaving: bool = False, order: wire.Order | None = None,
        rollback: RollbackOrder | None = None,
    ) -> Beat:  # fmt: skip
        """What all nodes are to know."""
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
    """The highest epoch that a node, or its supervisor, has heard: it heeds none of a lower one."""
    job = pulse.job or pulse.last_job
    return max(pulse.epoch, job.promised if job is not None else 0)


def _order_job(job: wire.JobReport) -> tuple[int, int, int]:
    return job.start, job.promised, job.accepted.epoch if job.accepted is not None else 0


def _outline(page: Page) -> OpenIncident:
    case = page.case
    return OpenIncident(
        id=case.id, attempt=case.attempt, alert=case.alert, nodes=page.nodes, severity=case.severity,
        problem_id=case.problem_id, first_step=case.first_step,
    )  # fmt: skip
