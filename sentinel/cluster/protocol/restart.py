"""The coordinator's orders to all nodes by which a job ends and begins again as a whole.

    on one node a fault ended a start of the job     end: the others end it, too
    it has ended on all nodes                        begin: the next one, or what the policy decides for the fault
    not on all within `PATIENCE_SECONDS`             stop: none begins again; with `--allow-shrink`, begin without them

On every node the same policy decides on the same fault, so all come to the same result: one attempt, one budget. An
order names the start that it is about and is repeated; a node that has carried it out says so in the report that comes
with each pulse, and ignores the repetitions. While the coordinator does not hear more than half of the nodes, it orders
nothing.

Where nodes may be left out, successive coordinators must not choose different nodes for one start. The supervisors,
which outlive daemons, agree as in Paxos (Lamport, "Paxos made simple", 2001), with the coordinator's epoch as the
ballot:

    end, of epoch e             a supervisor that has ended promises to accept nothing of a lower epoch
    all that ended promised     end, with the nodes that go on: those accepted under the highest epoch, if any were
                                accepted; else those that have ended
    all of these accepted it    begin, with these nodes: it is decided, and stays so for every later coordinator

The nodes that go on are more than half of those of the start that ended: any two decisions have a node in common, and
each decision has one in common with the nodes that a coordinator counts on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from sentinel import wire
from sentinel.cluster.protocol.messages import WORDS, NodeState
from sentinel.text import join_names, name_nodes

PATIENCE_SECONDS = 60.0
"""Seconds from the first node's end to the last one's: ending a start of the job takes up to half a minute."""
NAMED = 4


class JobMember(NamedTuple):
    """A node of the job; the coordinator's own is one, too."""

    state: NodeState
    job: wire.JobReport | None
    is_counted: bool = False
    """Whether the node follows this coordinator, and no other."""
    completed: bool = False
    """Whether its command completed successfully."""


class RestartOrders:
    """The orders of one job, as long as its nodes are the same. A decision on a start does not change."""

    def __init__(self, expected: int) -> None:
        """Start without an order. `expected`: number of nodes of the job."""
        self._expected = expected
        self._order: wire.Order | None = None
        self._since = 0.0
        """When the first node ended the start that the order is about."""
        self._proposal: wire.Order | None = None
        """The proposal of the present epoch."""

    def decide(self, members: Sequence[JobMember], now: float, epoch: int = 0, blame: str = "") -> wire.Order | None:
        """Return what all nodes must do; None: nothing. `epoch`: the coordinator's. `blame`: the node that was in most
        incidents, in words that follow the fault's."""
        heard = [member for member in members if member.state.state == "alive"]
        jobs = [member.job for member in heard if member.job is not None]
        if 2 * len(heard) <= self._expected or not jobs:
            return None
        start = min(job.start for job in jobs)  # a node that is behind has yet to carry out the last order
        mark = next((m.job.mark for m in heard if m.job is not None and m.state.node == 0), "")
        if (begun := _find_begun(jobs, start, mark)) is not None:  # by an order of this coordinator, or an earlier one
            return msgspec.structs.replace(begun, does="begin", epoch=epoch)
        before = self._order if self._order is not None and self._order.start == start else None
        if before is not None and before.does != "end":
            return before
        ended = [member for member in heard if _has_ended(member, start)]
        if not ended:
            return None
        if before is None:
            self._since = now
        order = wire.Order(
            start=start, does="begin", fault=combine_faults(ended, blame), epoch=epoch, job=mark,
            attempt=max(m.job.attempt for m in ended if m.job is not None),
        )  # fmt: skip
        self._order = self._follow_end(order, ended, members, now)
        return self._order

    def name_missing(self, members: Sequence[JobMember]) -> str:
        """Name the nodes that are not heard, or still run what has ended elsewhere."""
        jobs = [m.job for m in members if m.state.state == "alive" and m.job is not None]
        start = min((job.start for job in jobs), default=0)
        is_alone = any(job.start > start for job in jobs) and _find_begun(jobs, start, "") is None
        behind_first = sorted(members, key=lambda m: m.job is not None and m.job.start > start)
        absent = [
            f"node {m.state.node} ({m.state.hostname}: {why})"
            for m in behind_first
            if (why := _why_missing(m, start, is_alone=is_alone))
        ]
        if unheard := self._expected - len(members):
            absent.append(f"{unheard} node{'s' if unheard > 1 else ''} never heard")
        return join_names(absent, NAMED)

    def _follow_end(
        self, order: wire.Order, ended: Sequence[JobMember], members: Sequence[JobMember], now: float
    ) -> wire.Order:
        """Return the order that follows the end of a start. `order`: the one to begin with all nodes."""
        if len(ended) < self._expected and not _list_accepted(ended, order.start):
            missing = self.name_missing(members)
            if now - self._since <= PATIENCE_SECONDS:
                return msgspec.structs.replace(order, does="end", why=f"waits for {missing}"[:WORDS])
            if (hindrance := self._find_hindrance(ended, members)) is not None:
                words = order.fault.words if order.fault is not None else ""
                why = f"it ended ({words}), and cannot begin again without {missing}"
                why = f"{why}: {hindrance}" if hindrance else why
                return msgspec.structs.replace(order, does="stop", why=why[:WORDS])
        for option, field in (("--restarts", "restarts"), ("--allow-shrink", "allow_shrink")):
            if len(given := {getattr(m.job, field) for m in ended}) > 1:
                why = f"the nodes have different {option}: {join_names([str(n) for n in sorted(given)], NAMED)}"
                return msgspec.structs.replace(order, does="stop", why=why)
        return self._agree(order, ended) if given != {0} else order

    def _find_hindrance(self, ended: Sequence[JobMember], members: Sequence[JobMember]) -> str | None:
        """Return why the job cannot go on with only the nodes that ended; empty: it was not allowed. None: it can."""
        least = max(m.job.allow_shrink for m in ended if m.job is not None)
        if not least:
            return ""
        if 0 not in {m.state.node for m in ended}:
            return "node 0, where the ranks meet, cannot be left out"
        if complete := [m.state.node for m in members if m.completed]:
            return f"{name_nodes(complete)} completed the run"
        if 2 * len(ended) <= self._expected:
            return f"{len(ended)} of {self._expected} nodes are not more than half"
        return f"--allow-shrink {least} wants more than {len(ended)}" if len(ended) < least else None

    def _agree(self, order: wire.Order, ended: Sequence[JobMember]) -> wire.Order:
        """Return the proposal to the nodes that ended; the order to begin, once all proposed nodes accepted it."""
        proposal = self._proposal
        if proposal is None or (proposal.start, proposal.epoch) != (order.start, order.epoch):
            promised = sum(m.job.promised == order.epoch for m in ended if m.job is not None)
            if promised < len(ended) or 2 * promised <= self._expected:
                return msgspec.structs.replace(order, does="end", why="waits for the nodes to agree")
            nodes = tuple(sorted(m.state.node for m in ended))
            fresh = msgspec.structs.replace(order, nodes=nodes, why=f"waits for {name_nodes(nodes)} to agree")
            chosen = max(_list_accepted(ended, order.start), key=lambda one: one.epoch, default=fresh)
            self._proposal = proposal = msgspec.structs.replace(chosen, does="end", epoch=order.epoch)
        agreed = {m.state.node for m in ended if m.is_counted and _has_accepted(m, proposal)}
        decided = agreed.issuperset(proposal.nodes)
        return msgspec.structs.replace(proposal, does="begin") if decided else proposal


def combine_faults(ended: Sequence[JobMember], blame: str = "") -> wire.JobFault:
    """Return the job's fault from those of its nodes: the one that was alerted first; the others follow from it.
    `blame` as in `RestartOrders.decide`."""
    faults = [(member, member.job.fault) for member in ended if member.job is not None and member.job.fault is not None]
    member, first = min(faults, key=lambda pair: _order_fault(*pair))
    words = f"node {member.state.node} ({member.state.hostname}): {first.words}"
    return msgspec.structs.replace(
        first,
        words=(f"{words}; {blame}" if blame else words)[:WORDS],
        step=max((fault.step for _, fault in faults if fault.step is not None), default=None),
        sign=min((fault.sign for _, fault in faults if fault.sign is not None), default=None),
    )


def find_proposed(job: wire.JobReport | None) -> tuple[int, ...]:
    """Return the nodes that a node agreed to go on with, if it has not begun with them yet; (): none."""
    if job is None or job.accepted is None or job.accepted.start != job.start:
        return ()
    return job.accepted.nodes


def is_unaware(job: wire.JobReport, members: wire.Members) -> bool:
    """Whether a supervisor knows nothing of the agreement on these nodes, of which its own is one: all of them accepted
    it before any began, so the supervisor that accepted it is gone."""
    return job.members.start < members.start and not find_proposed(job)


def _list_accepted(members: Iterable[JobMember], start: int) -> list[wire.Order]:
    accepted = (member.job.accepted for member in members if member.job is not None)
    return [one for one in accepted if one is not None and one.start == start]


def _has_accepted(member: JobMember, proposal: wire.Order) -> bool:
    accepted = member.job.accepted if member.job is not None else None
    if accepted is not None and not accepted.job:  # an earlier version drops the mark
        accepted = msgspec.structs.replace(accepted, job=proposal.job)
    return accepted == proposal


def _find_begun(jobs: Iterable[wire.JobReport], start: int, mark: str) -> wire.Order | None:
    """Return the order by which a node began the start after this one. `mark`: the job's; empty: not known."""
    later = (order for job in jobs if job.start > start for order in (job.begun, job.accepted))
    of_job = (one for one in later if one is not None and (not one.job or one.job == mark or not mark))
    return next((one for one in of_job if one.start == start), None)


def _order_fault(member: JobMember, fault: wire.JobFault) -> tuple[bool, float, int]:
    return not fault.kind, fault.time if fault.time is not None else math.inf, member.state.node


def _has_ended(member: JobMember, start: int) -> bool:
    return member.job is not None and member.job.start == start and member.job.fault is not None


def _why_missing(member: JobMember, start: int, *, is_alone: bool) -> str:
    """Return why a node is missing; empty: it is not. `start`: the earliest of a node that is heard. `is_alone`: no
    order of the job leads from there to the later starts of others."""
    if member.state.state == "silent":
        return f"silent for {member.state.silent_seconds:.0f} s"
    if member.state.state == "left":
        return "its daemon has left"
    if member.job is None:
        return "no `sentinel run` of its own"
    if member.job.start > start:
        return "its ranks are at a later start"
    if is_alone:
        return "its `sentinel run` was started again, and not on all nodes"
    return "" if _has_ended(member, start) else "its ranks have not ended"
