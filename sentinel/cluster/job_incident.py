"""From the cases of many nodes to the incidents of their job: one alert over one stretch of steps is one incident."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import msgspec

from sentinel.cluster.messages import NodeCase
from sentinel.cluster.questions import IncidentView
from sentinel.config.settings import SEVERITIES
from sentinel.diagnose.case import Case
from sentinel.diagnose.evidence import SURENESS
from sentinel.text import join_names

ENDED = 1000
"""Ended incidents that are remembered, so that a case that comes late finds its own."""
MEMBERS = 1000


class JobIncident:
    """Cases of one alert whose stretches of steps overlap. Its id is that of the first one, and never changes."""

    def __init__(self, identity: str, attempt: int, alert: str) -> None:
        self.id, self.attempt, self.alert = identity, attempt, alert
        self.cases: dict[tuple[int, str], Case] = {}
        """By node and id."""
        self.told = False
        """Whether it was handed out for people."""

    @property
    def firing(self) -> bool:
        """Whether it fires on any node."""
        return any(case.state == "firing" for case in self.cases.values())

    @property
    def nodes(self) -> tuple[int, ...]:
        """Those that it is on, or was. Of what was judged over all ranks, those of the ranks that it names."""
        return tuple(sorted({one for (node, _), case in self.cases.items() for one in _list_nodes(node, case)}))

    def overlaps(self, case: Case) -> bool:
        """Whether a case of the same attempt and alert belongs to it."""
        first, last = _stretch(case)
        return any(first <= end and begin <= last for begin, end in map(_stretch, self.cases.values()))

    def combine(self) -> Case:
        """As one case. Where it is told from is the node whose diagnosis is surest, of these the first."""
        cases = sorted(self.cases.items(), key=lambda item: (item[1].first_step, item[0]))
        every = [case for _, case in cases]
        best = max(every, key=lambda case: SURENESS[case.diagnosis.confidence])
        members = [
            member if c.of_job else msgspec.structs.replace(member, node=str(node))
            for (node, _), c in cases
            for member in c.members
        ]
        ends = [case.resolved_time for case in every if case.resolved_time is not None]
        end_steps = [case.resolved_step for case in every if case.resolved_step is not None]
        firing = self.firing
        undone = all(case.state == "rolled_back" for case in every)
        nodes = self.nodes
        where = f"node{'s' if len(nodes) > 1 else ''} {join_names(list(map(str, nodes)), 8)}" if nodes else "all nodes"
        return msgspec.structs.replace(
            best,
            id=self.id,
            severity=max((case.severity for case in every), key=_urgency),
            state="firing" if firing else "rolled_back" if undone else "resolved",
            first_step=every[0].first_step,
            first_seq=min(case.first_seq for case in every),
            step=min(case.step for case in every),
            time=min(case.time for case in every),
            resolved_step=max(end_steps, default=None) if not firing else None,
            resolved_time=max(ends, default=None) if not firing else None,
            members=tuple(members[:MEMBERS]),
            summary=f"{best.summary} ({where})",
            done=tuple(dict.fromkeys(text for case in every for text in case.done)),
            silenced="",
            told=True,
        )


class JobIncidents:
    """The incidents of a job, by id, in the order in which they were opened."""

    def __init__(self, pages: Iterable[Case] = ()) -> None:
        """`pages`: what an earlier coordinator told people of, and not that it is over."""
        self._pages = {page.id: page for page in pages}
        self._incidents: dict[str, JobIncident] = {}
        self._changed: dict[str, None] = {}
        self._folded: dict[str, str] = {}
        """Id that is used no more -> the incident that its cases are in. An earlier coordinator gave it."""

    def __iter__(self) -> Iterator[JobIncident]:
        return iter(self._incidents.values())

    def add(self, node: int, given: NodeCase) -> None:
        """A case of a node as it is now: of an incident that there is, or of a new one. Twice is once."""
        case = given.case
        incident = self._find(node, given)
        if incident is None:
            identity = given.incident or self._find_page(case) or _first_id(node, case)
            incident = self._incidents[identity] = JobIncident(identity, case.attempt, case.alert)
        if self._pages.pop(incident.id, None) is not None:
            incident.told = True
            self._changed[incident.id] = None
        if given.incident and given.incident != incident.id and given.incident not in self._incidents:
            self._folded[given.incident] = incident.id
            self._changed[incident.id] = None
        fired, known = incident.firing, incident.cases.get((node, case.id))
        if known == case:
            return
        incident.cases[node, case.id] = case
        over = known is None and not fired and case.state != "firing"
        if not (over and (given.paged or incident.told)):  # else people know by the node, or by the others
            incident.told = True
            self._changed[incident.id] = None
        self._forget()

    def close_unknown(self, node: int, known: set[str]) -> None:
        """The node's daemon was restarted, and handed in all that it knows: what else fires there is over."""
        for incident in self:
            for (where, identity), case in list(incident.cases.items()):
                if where == node and case.state == "firing" and identity not in known:
                    over = msgspec.structs.replace(
                        case, state="resolved", done=(*case.done, f"over: the daemon of node {node} was restarted")
                    )
                    incident.cases[where, identity] = over
                    self._changed[incident.id] = None

    def close_pages(self) -> list[Case]:
        """All nodes have handed in what they know: what people were told of before, and none knows, is over."""
        pages, self._pages = self._pages, {}
        return [
            msgspec.structs.replace(
                page,
                state="resolved",
                done=(*page.done, "over: no node knows of it since the coordinator was restarted"),
            )
            for page in pages.values()
        ]

    def take_changes(self) -> list[Case]:
        """What changed since the last time, as cases: what people are to know."""
        changed, self._changed = self._changed, {}
        found = [self._combine(self._incidents[identity]) for identity in changed if identity in self._incidents]
        for identity, into in list(self._folded.items()):
            self._pages.pop(identity, None)
            if into in self._incidents:
                one = self._combine(self._incidents[into])
                done = (*one.done, f"over: it is incident {into}")
                found.append(msgspec.structs.replace(one, id=identity, state="resolved", done=done))
        self._folded.clear()
        return found

    def list_views(self) -> list[IncidentView]:
        """All that are remembered, in the order in which they were opened."""
        return [IncidentView(case=self._combine(one), sources=tuple(one.cases)) for one in self]

    def _combine(self, incident: JobIncident) -> Case:
        """As one case, whose parent and problem are incidents of the job, as its first case has them of its node's."""
        (node, _), first = next(iter(incident.cases.items()))
        return msgspec.structs.replace(
            incident.combine(),
            parent=self._find_id(node, first.parent),
            problem_id=self._find_id(node, first.problem_id),
        )

    def _find_id(self, node: int, identity: str) -> str:
        """Of the job's incident that a node's incident is in; empty where there is none."""
        return next((incident.id for incident in self if (node, identity) in incident.cases), "")

    def _find(self, node: int, given: NodeCase) -> JobIncident | None:
        case = given.case
        same = [i for i in self if (i.attempt, i.alert) == (case.attempt, case.alert)]
        of_member = (i for i in same if (node, case.id) in i.cases)
        by_id = (i for i in same if i.id in (given.incident, _first_id(node, case)))
        overlapping = (i for i in reversed(same) if i.overlaps(case))
        return next((i for found in (of_member, by_id, overlapping) for i in found), None)

    def _find_page(self, case: Case) -> str:
        last = _stretch(case)[1]
        same = (page for page in self._pages.values() if (page.attempt, page.alert) == (case.attempt, case.alert))
        return next((page.id for page in same if page.first_step <= last), "")

    def _forget(self) -> None:
        ended = [identity for identity, incident in self._incidents.items() if not incident.firing]
        for identity in ended[: max(len(ended) - ENDED, 0)]:
            if identity not in self._changed:
                del self._incidents[identity]


def _list_nodes(node: int, case: Case) -> list[int]:
    return [int(member.node) for member in case.members if member.node] if case.of_job else [node]


def _first_id(node: int, case: Case) -> str:
    """Id of the incident that this case opens."""
    return f"n{node}-{case.id}"


def _stretch(case: Case) -> tuple[float, float]:
    if case.state == "firing":
        return case.first_step, math.inf
    return case.first_step, max(case.resolved_step or 0, case.step)


def _urgency(severity: str) -> int:
    return SEVERITIES.index(severity) if severity in SEVERITIES else -1
