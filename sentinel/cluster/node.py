"""A node's side of the protocol: its numbered events, and whether it hears the coordinator. No network, no clock."""

from __future__ import annotations

from typing import Literal

import msgspec

from sentinel import wire
from sentinel.cluster.messages import CASE_BYTES, MESSAGE_BYTES, Beat, Events, NodeCase, trim_case
from sentinel.diagnose.case import Case

LOCAL_VIEW_SECONDS = 10.0
"""Without a beat of the coordinator: from here on the node says that it sees itself alone."""
ALONE_SECONDS = 30.0
"""The same: from here on it tells people by itself. A coordinator is restarted within less."""
KEPT = 1000
"""Cases that wait for a coordinator, at most."""
AT_ONCE = MESSAGE_BYTES // CASE_BYTES - 1

View = Literal["joined", "local view", "alone"]


class Node:
    """Keeps each case until the coordinator has applied its last change, and tells of it alone where there is none."""

    def __init__(self, node: int, incarnation: int, now: float) -> None:
        self.node, self.incarnation = node, incarnation
        self.last = self.applied = 0
        """Numbers of the last event, and of the last that the coordinator applied."""
        self.beat: Beat | None = None
        """The last that was heard."""
        self.heard = now
        self._coordinator_left = False
        self._kept: dict[str, NodeCase] = {}
        self._known: set[str] = set()
        """Cases that a coordinator applied: it tells people of them."""
        self._told = 0
        """Number of the last event that people were told of by us."""

    @property
    def unapplied(self) -> int:
        """Cases of which the coordinator does not know all."""
        return sum(given.number > self.applied for given in self._kept.values())

    def find_view(self, now: float) -> View:
        """Whether the coordinator is heard."""
        silent = now - self.heard
        if self._coordinator_left or silent > ALONE_SECONDS:
            return "alone"
        return "local view" if silent > LOCAL_VIEW_SECONDS or self.beat is None else "joined"

    def find_order(self, now: float) -> wire.Order | None:
        """What the coordinator has all nodes do, be it its last word; None where it is not heard."""
        return self.beat.order if self.beat is not None and now - self.heard <= LOCAL_VIEW_SECONDS else None

    def record(self, case: Case) -> Events:
        """A case is new, or changed. Returns what the coordinator is sent."""
        before = self._kept.pop(case.id, None)
        self.last += 1
        kept = NodeCase(
            number=self.last,
            case=trim_case(case),
            incident=before.incident if before else "",
            paged=before is not None and before.paged,
        )
        self._kept[case.id] = kept
        if len(self._kept) > KEPT:
            ended = (identity for identity, one in self._kept.items() if one.case.state != "firing")
            del self._kept[next(ended, next(iter(self._kept)))]
        return self._events(self.last - 1, [kept], self.last)

    def list_events(self, after: int) -> Events:
        """All that changed after an event, as much of it as one message holds."""
        found = sorted((one for one in self._kept.values() if one.number > after), key=lambda one: one.number)
        whole = len(found) <= AT_ONCE
        return self._events(after, found[:AT_ONCE], self.last if whole else found[AT_ONCE - 1].number)

    def take_beat(self, beat: Beat, now: float) -> list[str]:
        """The coordinator is there. Returns the ids of the cases that it knows by now: it tells people of them."""
        if self.beat is not None and beat.epoch < self.beat.epoch:
            return []  # of a coordinator that is no more
        if self.beat is None or beat.epoch > self.beat.epoch:
            self.applied = 0
        self.beat, self.heard, self._coordinator_left = beat, now, beat.leaving
        own = next((state for state in beat.nodes if state.node == self.node), None)
        if own is None:
            return []
        if own.incarnation > self.incarnation:  # the clock was set back before this start
            self.incarnation = own.incarnation + 1
        if own.incarnation != self.incarnation:
            return []
        self.applied = max(self.applied, own.applied)
        applied = [identity for identity, one in self._kept.items() if one.number <= self.applied]
        for identity in applied:
            kept = self._kept[identity]
            self._known.add(identity)
            if kept.case.state != "firing":
                del self._kept[identity]
                self._known.discard(identity)
            elif (incident := self._find_incident(beat, kept.case)) and incident != kept.incident:
                self._kept[identity] = msgspec.structs.replace(kept, incident=incident)
        return applied

    def take_untold(self, now: float, *, leaving: bool = False) -> list[Case]:
        """What this node has to tell people by itself, with nothing to hear of the coordinator. `leaving`: at once."""
        if self.find_view(now) != "alone" and not leaving:
            return []
        found = [
            (identity, one)
            for identity, one in self._kept.items()
            if one.number > max(self._told, self.applied) and identity not in self._known
        ]
        self._told = self.last
        for identity, one in found:
            self._kept[identity] = msgspec.structs.replace(one, paged=True)
        return [one.case for _, one in found]

    def _find_incident(self, beat: Beat, case: Case) -> str:
        same = (one for one in beat.incidents if (one.attempt, one.alert) == (case.attempt, case.alert))
        return next((one.id for one in same if self.node in one.nodes), "")

    def _events(self, after: int, cases: list[NodeCase], upto: int) -> Events:
        return Events(node=self.node, incarnation=self.incarnation, after=after, upto=upto, cases=tuple(cases))
