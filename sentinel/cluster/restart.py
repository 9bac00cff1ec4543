"""What the coordinator has all nodes do, so that a job ends and begins again as a whole. No network, no clock.

    on one node a fault ended a start of the job     end: the others end it, too
    it has ended on all nodes                        begin: the next one, or what the policy says of the fault
    not on all within `PATIENCE_SECONDS`             stop: none begins again

Every node has the same policy decide the same fault, so that they come to the same: one attempt, one budget. An order
names the start that it is about and is repeated; who has carried it out says so in the report that comes with each
pulse, and no repetition concerns it any more. While the coordinator does not hear more than half of the nodes, it
orders nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from sentinel import wire
from sentinel.cluster.messages import NodeState
from sentinel.text import join_names

PATIENCE_SECONDS = 60.0
"""From the first node's end to the last one's: to end a start of the job takes up to half a minute."""
NAMED = 4
_WORDS = 1000


class JobMember(NamedTuple):
    """A node of the job, the coordinator's own among them."""

    state: NodeState
    job: wire.JobReport | None


class RestartOrders:
    """Of one job. What it decided on a start stays as it is."""

    def __init__(self, expected: int) -> None:
        """`expected`: nodes of the job."""
        self._expected = expected
        self._order: wire.Order | None = None
        self._since = 0.0
        """When the first node ended what the order is about."""

    def decide(self, members: Sequence[JobMember], now: float) -> wire.Order | None:
        """What all nodes are to do; None: nothing."""
        heard = [member for member in members if member.state.state == "alive"]
        jobs = [member.job for member in heard if member.job is not None]
        if 2 * len(heard) <= self._expected or not jobs:
            return None
        start = min(job.start for job in jobs)  # who is behind has not carried out the last order yet
        before = self._order if self._order is not None and self._order.start == start else None
        if before is not None and before.does != "end":
            return before
        ended = [member for member in heard if _has_ended(member, start)]
        if not ended:
            return None
        if before is None:
            self._since = now
        self._order = self._follow_end(start, ended, members, now)
        return self._order

    def name_missing(self, members: Sequence[JobMember]) -> str:
        """Who is not heard, or still runs what has ended elsewhere."""
        starts = [m.job.start for m in members if m.state.state == "alive" and m.job is not None]
        absent = [
            f"node {m.state.node} ({m.state.hostname}: {why})"
            for m in members
            if (why := _why_missing(m, min(starts, default=0)))
        ]
        if unheard := self._expected - len(members):
            absent.append(f"{unheard} node{'s' if unheard > 1 else ''} never heard")
        return join_names(absent, NAMED)

    def _follow_end(
        self, start: int, ended: Sequence[JobMember], members: Sequence[JobMember], now: float
    ) -> wire.Order:
        fault = combine_faults(ended)
        order = wire.Order(
            start=start, does="begin", fault=fault, attempt=max(m.job.attempt for m in ended if m.job is not None)
        )
        if len(ended) < self._expected:
            missing = self.name_missing(members)
            if now - self._since <= PATIENCE_SECONDS:
                return msgspec.structs.replace(order, does="end", why=f"waits for {missing}"[:_WORDS])
            why = f"it ended ({fault.words}), and cannot begin again without {missing}"
            return msgspec.structs.replace(order, does="stop", why=why[:_WORDS])
        if len(allowed := {m.job.restarts for m in ended if m.job is not None}) > 1:
            why = f"the nodes have different --restarts: {join_names([str(n) for n in sorted(allowed)], NAMED)}"
            return msgspec.structs.replace(order, does="stop", why=why)
        return order


def combine_faults(ended: Sequence[JobMember]) -> wire.JobFault:
    """Why the job ended, of why its nodes did: what was alerted first; the others follow from it."""
    faults = [(member, member.job.fault) for member in ended if member.job is not None and member.job.fault is not None]
    member, first = min(faults, key=lambda pair: _order_fault(*pair))
    return msgspec.structs.replace(
        first,
        words=f"node {member.state.node} ({member.state.hostname}): {first.words}"[:_WORDS],
        step=max((fault.step for _, fault in faults if fault.step is not None), default=None),
        sign=min((fault.sign for _, fault in faults if fault.sign is not None), default=None),
    )


def _order_fault(member: JobMember, fault: wire.JobFault) -> tuple[bool, float, int]:
    return not fault.kind, fault.time if fault.time is not None else math.inf, member.state.node


def _has_ended(member: JobMember, start: int) -> bool:
    return member.job is not None and member.job.start == start and member.job.fault is not None


def _why_missing(member: JobMember, start: int) -> str:
    if member.state.state == "silent":
        return f"silent for {member.state.silent_seconds:.0f} s"
    if member.state.state == "left":
        return "its daemon has left"
    if member.job is None:
        return "no `sentinel run` of its own"
    return "" if _has_ended(member, start) else "its ranks have not ended"
