"""A node's side of the protocol: its numbered events, and whether it hears the coordinator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from sentinel import wire
from sentinel.cluster.protocol.election import Election
from sentinel.cluster.protocol.messages import (
    CASE_BYTES,
    MESSAGE_BYTES,
    Beat,
    Events,
    NodeCase,
    NodeState,
    trim_case,
)
from sentinel.diagnose.case import Case

LOCAL_VIEW_SECONDS = 10.0
"""Seconds without a beat of an acting coordinator after which the node's view of the job is only its own."""
ALONE_SECONDS = 30.0
"""The same, after which the node tells people by itself. A coordinator is replaced, or restarted, in less."""
KEPT = 1000
"""The most cases that wait for a coordinator."""
AT_ONCE = MESSAGE_BYTES // CASE_BYTES - 1
"""The most cases in one message."""

_PAGE = "job/"
"""Prefix of a job's incident among the kept cases: the ids of the node's own cases have the same form."""

View = Literal["joined", "local view", "alone"]


class Node:
    """Keeps each case until the coordinator has applied its last change; without one, hands it out for people."""

    def __init__(self, node: int, incarnation: int, now: float, candidates: int = 1) -> None:
        """Start without events. `candidates`: how many nodes may be the coordinator, from node 0 on."""
        self.node, self.incarnation = node, incarnation
        self.election = Election(node, candidates, now)
        self.last = self.applied = 0
        """Numbers of the last event, and of the last that the coordinator applied."""
        self.beat: Beat | None = None
        """The last beat that was followed."""
        self.members = wire.Members()
        """The nodes of the job, as far as this one knows."""
        self.heard = now
        """When the last beat of an acting coordinator came."""
        self._acting_beat: Beat | None = None
        self._beat_time = now
        """When `beat` came."""
        self._joined = self._coordinator_left = False
        self.dropped = 0
        """Number of cases that were dropped before a coordinator applied them, as too many waited."""
        self._kept: dict[str, NodeCase] = {}
        self._known: set[str] = set()
        """Ids of the cases that a coordinator applied: it tells people of them."""
        self._told = 0
        """Number of the last event of which this node told people."""

    @property
    def unapplied(self) -> int:
        """Number of cases with changes that the coordinator has not applied."""
        return sum(given.number > self.applied for given in self._kept.values())

    @property
    def is_left_out(self) -> bool:
        """Whether the job goes on without this node."""
        return not self.members.has(self.node)

    def note_members(self, members: wire.Members) -> None:
        """Take the job's nodes from its supervisor, its ranks or a coordinator, if they are of a later start."""
        if members.start > self.members.start or not self.members.nodes:
            self.members = msgspec.structs.replace(members, job=members.job or self.members.job)

    def forget_members(self) -> None:
        """Take all nodes as members: the job was started from its beginning under its run id. The former job's mark
        stays: by it a coordinator knows that what it takes over was counted there."""
        self.members = wire.Members(job=self.members.job)

    def find_view(self, now: float) -> View:
        """Return "joined" where the coordinator is heard; else "local view", and after `ALONE_SECONDS` "alone"."""
        silent = now - self.heard
        if self._coordinator_left or silent > ALONE_SECONDS:
            return "alone"
        return "local view" if silent > LOCAL_VIEW_SECONDS or not self._joined else "joined"

    def is_cut_off(self, now: float) -> bool:
        """Whether no coordinator was heard for `ALONE_SECONDS`, though none has left."""
        return now - self.heard > ALONE_SECONDS and not self._coordinator_left

    def find_order(self, now: float) -> wire.Order | None:
        """Return the coordinator's order, which may be its last; None where it gives none or is not heard."""
        return self.beat.order if self.beat is not None and now - self.heard <= LOCAL_VIEW_SECONDS else None

    def recall_beat(self, now: float) -> Beat | None:
        """Return the last beat with all nodes that this one has heard of, and for how long each is silent; None before
        the first. A coordinator that took the role because it hears no other node has itself alone in its beats."""
        if self.beat is None:
            return None
        states: dict[int, NodeState] = {}
        for beat, age in ((self._acting_beat, now - self.heard), (self.beat, now - self._beat_time)):
            for state in beat.nodes if beat is not None else ():
                states[state.node] = msgspec.structs.replace(state, silent_seconds=state.silent_seconds + age)
        return msgspec.structs.replace(self.beat, nodes=tuple(state for _, state in sorted(states.items())))

    def record(self, case: Case, *, paged: bool = False) -> Events:
        """Keep a new or changed case. `paged`: people know of it from this node. Returns the events to send."""
        before = self._kept.pop(case.id, None)
        self.last += 1
        kept = NodeCase(
            number=self.last,
            case=trim_case(case),
            incident=before.incident if before else "",
            paged=paged or (before is not None and before.paged),
        )
        self._kept[case.id] = kept
        if len(self._kept) > KEPT:
            ended = (identity for identity, one in self._kept.items() if one.case.state != "firing")
            dropped = self._kept.pop(next(ended, next(iter(self._kept))))
            self.dropped += dropped.number > self.applied
        return self._events(self.last - 1, [kept], self.last)

    def record_page(self, case: Case) -> None:
        """Keep an incident of the job, of which this node told people while it was the coordinator."""
        self.last += 1
        self._kept[f"{_PAGE}{case.id}"] = NodeCase(number=self.last, case=trim_case(case), of_job=True)

    @property
    def has_pages(self) -> bool:
        """Whether it keeps incidents of the job of whose end no other coordinator has told."""
        return any(given.of_job for given in self._kept.values())

    def list_events(self, after: int) -> Events:
        """Return the changes after an event, as many as one message holds."""
        found = sorted((one for one in self._kept.values() if one.number > after), key=lambda one: one.number)
        whole = len(found) <= AT_ONCE
        return self._events(after, found[:AT_ONCE], self.last if whole else found[AT_ONCE - 1].number)

    def take_beat(self, beat: Beat, now: float) -> list[str]:
        """Take a coordinator's beat. Returns the ids of the cases that it has applied, and tells people of."""
        if not self.members.has(beat.node):
            return []
        if beat.acting and not beat.members.is_of_other_job(self.members.job):
            self.note_members(beat.members)  # even if not followed: a node that tried the role has a higher epoch
        if not self.election.follow(beat, now):
            return []
        if beat.members.job and not self.members.start:
            self.members = msgspec.structs.replace(self.members, job=beat.members.job)
        if self.beat is None or beat.epoch > self.beat.epoch:
            self.applied = 0
        self.beat, self._beat_time = beat, now
        if beat.acting and self.members.admits(self.node, beat.expected):
            self.heard, self._joined, self._acting_beat = now, True, beat
            self._coordinator_left = beat.leaving and not self._is_replaceable(beat)
        own = next((state for state in beat.nodes if state.node == self.node), None)
        if own is None:
            return []
        if own.incarnation > self.incarnation:  # the clock was set back before this start
            self.incarnation = own.incarnation + 1
        if own.incarnation != self.incarnation:
            return []
        self.applied = max(self.applied, own.applied)
        applied = [identity for identity, one in self._kept.items() if one.number <= self.applied]
        self._note_known(applied, beat)
        return applied

    def _note_known(self, applied: Iterable[str], beat: Beat) -> None:
        """Drop the cases that are over, as the coordinator has them; for the others, note the job's incident."""
        keeps_pages = self._keeps_pages(beat)
        for identity in applied:
            kept = self._kept[identity]
            if kept.of_job and keeps_pages:
                continue
            self._known.add(identity)
            if kept.case.state != "firing" or kept.of_job:
                del self._kept[identity]
                self._known.discard(identity)
            elif (incident := self._find_incident(beat, kept.case)) and incident != kept.incident:
                self._kept[identity] = msgspec.structs.replace(kept, incident=incident)

    def take_untold(self, now: float, *, leaving: bool = False) -> list[Case]:
        """Return the cases of which this node must tell people, as no coordinator is heard. `leaving`: at once."""
        if self.find_view(now) != "alone" and not leaving:
            return []
        found = [
            (identity, one)
            for identity, one in self._kept.items()
            if one.number > max(self._told, self.applied) and identity not in self._known and not one.of_job
        ]
        self._told = self.last
        for identity, one in found:
            self._kept[identity] = msgspec.structs.replace(one, paged=True)
        return [one.case for _, one in found]

    def _keeps_pages(self, beat: Beat) -> bool:
        """Whether the coordinator does not know all incidents of the job that were sent from here, or some are still
        open: it has a page that it did not send itself only in memory."""
        still_open = {one.id for one in beat.incidents}
        pages = (given for given in self._kept.values() if given.of_job)
        return any(page.number > self.applied or page.case.id in still_open for page in pages)

    def _is_replaceable(self, beat: Beat) -> bool:
        """Whether the remaining nodes can have another coordinator than the sender."""
        left = [one.node for one in beat.nodes if one.state == "alive" and one.node != beat.node]
        return 2 * len(left) > beat.expected and min(left) < self.election.candidates

    def _find_incident(self, beat: Beat, case: Case) -> str:
        same = (one for one in beat.incidents if (one.attempt, one.alert) == (case.attempt, case.alert))
        return next((one.id for one in same if self.node in one.nodes), "")

    def _events(self, after: int, cases: list[NodeCase], upto: int) -> Events:
        return Events(node=self.node, incarnation=self.incarnation, after=after, upto=upto, cases=tuple(cases))
