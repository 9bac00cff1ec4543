"""From the cases of many nodes to the incidents of their job: one alert over one stretch of steps is one incident."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import msgspec

from sentinel.cluster.protocol.messages import NodeCase
from sentinel.cluster.protocol.questions import IncidentView
from sentinel.config.settings import SEVERITIES
from sentinel.diagnose import folding
from sentinel.diagnose.case import Case, CaseMember
from sentinel.diagnose.evidence import SURENESS, Finding
from sentinel.diagnose.explanations import is_explained_over_nodes
from sentinel.text import name_nodes

ENDED, ENDED_CASES = 1000, 8192
"""The most ended incidents that are remembered, so that a late case finds its incident, and the most cases of them: a
job-wide alert has one on each node, of up to 10 kB."""
MEMBERS = 1000
CASES, DONE = 256, 64
"""The most ended cases of an incident, and sentences of what was done: an alert that always fires on some node is one
incident for days."""


class Page(NamedTuple):
    """An open incident in the form that people know."""

    case: Case
    nodes: tuple[int, ...]
    """The nodes of the incident, as far as they are known."""


class JobIncident:
    """Cases of one alert whose stretches of steps overlap. The id is the first one's, or an earlier coordinator's."""

    def __init__(self, identity: str, attempt: int, alert: str) -> None:
        self.id, self.attempt, self.alert = identity, attempt, alert
        self.cases: dict[tuple[int, str], Case] = {}
        """Cases by node and id, in the order in which they came."""
        self.told = False
        """Whether people hear of it from the job: not if it is over and its node already told them."""
        self.verdict: Finding | None = None
        """Its cause according to the ranks of all nodes; None: they were not asked, or did not find one."""
        self.asked = self.awaits_verdict = False
        """Whether the ranks were asked for the cause, and whether people wait for their answer."""
        self.known = False
        """Whether people may know it by its id."""
        self.severity = ""
        """Severity in which people know it from an earlier coordinator."""
        self.joined = self.joined_problem = ""
        """Ids of the incident of another node of which it is a consequence, and of that incident's problem."""
        self._firing = set[tuple[int, str]]()
        """Those of `cases` that fire."""
        self._first, self._last = math.inf, -math.inf
        """The first step of all its cases so far, and the last of those that ended."""
        self._merged: Case | None = None
        """Its cases as one, without what `combine` adds; None: not made since the last of them changed."""

    @property
    def firing(self) -> bool:
        """Whether it fires on any node."""
        return bool(self._firing)

    def put(self, node: int, case: Case) -> None:
        """Take a node's case as it is now."""
        first, last = _stretch(case)
        self.cases[node, case.id], self._merged = case, None
        self._first = min(self._first, first)
        if case.state == "firing":
            self._firing.add((node, case.id))
        else:
            self._firing.discard((node, case.id))
            self._last = max(self._last, last)
        self._forget_ended()

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes that it is or was on; of a case judged over all ranks, those of the ranks that it names."""
        return tuple(sorted({one for (node, _), case in self.cases.items() for one in _list_nodes(node, case)}))

    def overlaps(self, case: Case) -> bool:
        """Whether a case of the same attempt and alert belongs to it."""
        first, last = _stretch(case)
        if last < self._first or (first > self._last and not self._firing):  # as with nearly all that are over
            return False
        return any(first <= end and begin <= last for begin, end in map(_stretch, self.cases.values()))

    def _forget_ended(self) -> None:
        """Drop all ended cases but the newest `CASES`, and the first one: the incident has its parent and problem."""
        if len(self.cases) - len(self._firing) > CASES:
            ended = [key for key in list(self.cases)[1:] if key not in self._firing]
            for key in ended[:-CASES]:
                del self.cases[key]

    def find_distance(self, case: Case) -> int:
        """Return the steps between the first step of this case and the nearest first step of the incident's cases."""
        return min(abs(case.first_step - one.first_step) for one in self.cases.values())

    def combine(self) -> Case:
        """Return the incident as one case, in the words of the node with the surest diagnosis, the first of several."""
        if self._merged is None:
            self._merged = self._merge()
        found = self.verdict or self._merged.diagnosis
        return msgspec.structs.replace(
            self._merged,
            id=self.id,
            severity=max(self.severity, self._merged.severity, key=_urgency),
            diagnosis=msgspec.structs.replace(found, remedy=found.remedy or self._merged.diagnosis.remedy),
        )

    def _merge(self) -> Case:
        cases = sorted(self.cases.items(), key=lambda item: (item[1].first_step, item[0]))
        every = [case for _, case in cases]
        (source, _), best = max(cases, key=lambda item: SURENESS[item[1].diagnosis.confidence])
        every_member = [
            member if c.of_job else msgspec.structs.replace(member, node=str(node))
            for (node, _), c in cases
            for member in c.members
        ]
        members: dict[tuple[str, str, str], CaseMember] = {}
        for member in every_member:  # a former coordinator and the present one name the same ranks
            members.setdefault((member.scope, member.name, member.node), member)
        ends = [case.resolved_time for case in every if case.resolved_time is not None]
        last = max(every, key=lambda case: -1 if case.resolved_step is None else case.resolved_step)
        firing = self.firing
        undone = all(case.state == "rolled_back" for case in every)
        nodes = self.nodes
        where, others = name_nodes(nodes), [node for node in nodes if node != source]
        if others and source in nodes and not best.of_job:  # the members and numbers are of this node
            where = f"node {source}; the same on {name_nodes(others)}"
        return msgspec.structs.replace(
            best,
            severity=max((case.severity for case in every), key=_urgency),
            state="firing" if firing else "rolled_back" if undone else "resolved",
            first_step=every[0].first_step,
            first_seq=min(case.first_seq for case in every),
            step=min(case.step for case in every),
            time=min(case.time for case in every),
            resolved_step=last.resolved_step if not firing else None,
            resolved_time=max(ends, default=None) if not firing else None,
            leaves=last.leaves if not firing else "",
            members=tuple(members.values())[:MEMBERS],
            summary=f"{best.summary} ({where})",
            done=tuple(dict.fromkeys(text for case in every for text in case.done))[-DONE:],
            silenced="",
            told=True,
        )


class JobIncidents:
    """The incidents of a job, by id, in the order in which they were opened."""

    def __init__(self, pages: Iterable[Page] = ()) -> None:
        """Start without incidents. `pages`: those that an earlier coordinator left open."""
        self._pages = {page.case.id: page for page in pages}
        self._incidents: dict[str, JobIncident] = {}
        self._changed: dict[str, None] = {}
        self._folded: dict[str, str] = {}
        """An earlier coordinator's id that is no longer used -> the incident that has its cases."""

    def __iter__(self) -> Iterator[JobIncident]:
        return iter(self._incidents.values())

    def find(self, identity: str) -> JobIncident | None:
        """Return the incident with this id; None: there is none."""
        return self._incidents.get(identity)

    def add(self, node: int, given: NodeCase) -> None:
        """Put a node's case, as it is now, into its incident, or into a new one. Adding it twice changes nothing."""
        case = given.case
        incident = self._find_incident(node, given)
        if incident is None:
            former = given.incident or self._find_page(case)
            identity = former or _first_id(node, case)
            incident = self._incidents[identity] = JobIncident(identity, case.attempt, case.alert)
            incident.known = bool(former)
            self._folded.pop(identity, None)  # the id is used again: its page goes on
            self._fold(incident, case)
        if given.incident and given.incident not in self._incidents:
            if incident.known:
                self._folded[given.incident] = incident.id
                self._changed[incident.id] = None
            else:
                self._rename(incident, given.incident)
        if (page := self._pages.pop(incident.id, None)) is not None:
            incident.severity = page.case.severity
            incident.told = incident.asked = incident.known = True
            self._changed[incident.id] = None
        fired, known = incident.firing, incident.cases.get((node, case.id))
        if known == case:
            return
        incident.put(node, case)
        over = known is None and not fired and case.state != "firing"
        if not (over and (given.paged or incident.told)):  # else people know it from the node, or from other cases
            incident.told = True
            self._changed[incident.id] = None
        self._forget()

    def take_unexplained(self) -> list[JobIncident]:
        """Return each firing incident whose cause the ranks of all nodes decide, once: people are told of it after
        `explain` was called, or its `awaits_verdict` was reset."""
        found = [one for one in self if one.firing and not one.asked and is_explained_over_nodes(one.alert)]
        for incident in found:
            incident.asked = incident.awaits_verdict = True
        return found

    def explain(self, incident: JobIncident, verdict: Finding | None) -> None:
        """Take the answer of the ranks of all nodes; None: they know no more than their nodes."""
        incident.verdict, incident.awaits_verdict = verdict, False
        if incident.told:
            self._changed[incident.id] = None

    @property
    def awaits_verdict(self) -> bool:
        """Whether an incident is kept from people until its cause is known."""
        return any(incident.awaits_verdict for incident in self)

    def add_page(self, case: Case) -> None:
        """Take an incident that a former coordinator told people of, but not of its end."""
        if (incident := self._incidents.get(case.id)) is not None:
            incident.told = incident.known = True
            incident.severity = max(incident.severity, case.severity, key=_urgency)
            self._changed[case.id] = None
        else:
            self._pages.setdefault(case.id, Page(msgspec.structs.replace(case, state="firing"), ()))

    def close_unknown(self, node: int, known: set[str], why: str) -> None:
        """End the node's firing cases except those that are known there. `why`: the reason, in words."""
        for incident in self:
            for (where, identity), case in list(incident.cases.items()):
                if where == node and case.state == "firing" and identity not in known:
                    over = msgspec.structs.replace(case, state="resolved", done=(*case.done, f"over: {why}"))
                    incident.put(where, over)
                    self._changed[incident.id] = None

    def close_pages(self, heard: Collection[int]) -> list[Case]:
        """Return the ends of the pages whose nodes are all among these, which have handed in what they know."""
        closed = [identity for identity, page in self._pages.items() if set(page.nodes) <= set(heard)]
        pages = [self._pages.pop(identity).case for identity in closed]
        return [
            msgspec.structs.replace(
                page,
                state="resolved",
                done=(*page.done, "over: no node knows of it since the job has another coordinator"),
            )
            for page in pages
        ]

    def list_open(self) -> list[Page]:
        """Return the firing incidents, and an earlier coordinator's pages that no node has handed in yet."""
        firing = [Page(self._combine(incident), incident.nodes) for incident in self if incident.firing]
        return [*self._pages.values(), *firing]

    def take_changes(self, *, leaving: bool = False) -> list[Case]:
        """Return the incidents that changed since the last call, as cases for people. `leaving`: also those that wait
        for their cause."""
        held = () if leaving else tuple(one.id for one in self if one.awaits_verdict)
        changed = [identity for identity in self._changed if identity not in held]
        self._changed = {identity: None for identity in self._changed if identity in held}
        incidents = [self._incidents[identity] for identity in changed if identity in self._incidents]
        for incident in incidents:
            incident.known = True
        return [self._combine(incident) for incident in incidents]

    def take_folded(self) -> list[Case]:
        """Return the ends of the incidents whose cases went into another one since the last call, in the form that
        people know. They hear of the other one instead."""
        found: list[Case] = []
        for identity, into in self._folded.items():
            page = self._pages.pop(identity, None)
            if page is not None:
                one = page.case
            elif into in self._incidents:
                one = self._combine(self._incidents[into])
                problem = identity if one.problem_id == into else one.problem_id
                one = msgspec.structs.replace(one, id=identity, problem_id=problem)
            else:
                continue
            done = (*one.done, f"over: it is incident {into}")
            found.append(msgspec.structs.replace(one, state="resolved", done=done))
        self._folded.clear()
        return found

    def list_views(self) -> list[IncidentView]:
        """Return all remembered incidents, in the order in which they were opened."""
        return [IncidentView(case=self._combine(one), sources=tuple(one.cases)) for one in self]

    def _fold(self, incident: JobIncident, case: Case) -> None:
        """Find out whether a new incident that opened a problem on its node is a consequence of another node's: 63
        ranks wait for one that died elsewhere. What an earlier coordinator told people stays as it is."""
        if (page := self._pages.get(incident.id)) is not None:
            own = page.case.problem_id == incident.id
            incident.joined, incident.joined_problem = page.case.parent, "" if own else page.case.problem_id
        elif case.problem and case.problem_id == case.id:
            others = [self._combine(one) for one in self if one is not incident and one.attempt == case.attempt]
            if (parent := folding.find_parent(case, others)) is not None:
                incident.joined, incident.joined_problem = parent.id, parent.problem_id

    def _rename(self, incident: JobIncident, identity: str) -> None:
        """Give the incident the id of an earlier coordinator, by which people know it."""
        before, incident.id, incident.known = incident.id, identity, True
        self._incidents = {one.id: one for one in self}
        self._changed.pop(before, None)
        self._changed[identity] = None
        for one in self:
            one.joined = identity if one.joined == before else one.joined
            one.joined_problem = identity if one.joined_problem == before else one.joined_problem

    def _combine(self, incident: JobIncident) -> Case:
        """Return the incident as one case whose parent and problem are incidents of the job: those of its first case on
        its node, or those of another node's incident that it joined."""
        (node, _), first = next(iter(incident.cases.items()))
        parent, opener = self._find(node, first.parent), self._find(node, first.problem_id)
        joined = self._incidents.get(incident.joined)
        if parent is None and joined is not None and joined.firing:
            parent = joined
        # The node may have forgotten an opener that is over: then the problem is that of an earlier coordinator's.
        problem = (opener.joined_problem or opener.id) if opener is not None else incident.joined_problem
        return msgspec.structs.replace(incident.combine(), parent=parent.id if parent else "", problem_id=problem)

    def _find(self, node: int, identity: str) -> JobIncident | None:
        """Return the job's incident that has a node's case; None: none has."""
        return next((incident for incident in self if (node, identity) in incident.cases), None) if identity else None

    def _find_incident(self, node: int, given: NodeCase) -> JobIncident | None:
        case = given.case
        same = [i for i in self if (i.attempt, i.alert) == (case.attempt, case.alert)]
        if (known := next((i for i in same if (node, case.id) in i.cases), None)) is not None:
            return known
        named = next((i for i in same if i.id in (given.incident, _first_id(node, case))), None)
        if named is not None and (named.firing or case.state != "firing"):
            return named
        # A node that was cut off hands in the beginning of what is over elsewhere, where the alert has fired again
        # since. A case that an earlier coordinator put into an ended incident does not reopen that next to a
        # firing one.
        overlapping = [i for i in reversed(same) if i.overlaps(case)]
        if named is not None:
            overlapping = [i for i in overlapping if i.firing] or overlapping
        return min(overlapping, key=lambda one: one.find_distance(case), default=named)

    def _find_page(self, case: Case) -> str:
        last = _stretch(case)[1]
        same = (page for page, _ in self._pages.values() if (page.attempt, page.alert) == (case.attempt, case.alert))
        return next((page.id for page in same if page.first_step <= last), "")

    def _forget(self) -> None:
        ended = [incident for incident in self if not incident.firing]
        count, cases = len(ended), sum(len(incident.cases) for incident in ended)
        for incident in ended:
            if count <= ENDED and cases <= ENDED_CASES:
                break
            count, cases = count - 1, cases - len(incident.cases)
            if incident.id not in self._changed:
                del self._incidents[incident.id]


def _list_nodes(node: int, case: Case) -> list[int]:
    return [int(member.node) for member in case.members if member.node] if case.of_job else [node]


def _first_id(node: int, case: Case) -> str:
    """Return the id of the incident that this case opens."""
    return f"n{node}-{case.id}"


def _stretch(case: Case) -> tuple[float, float]:
    if case.state == "firing":
        return case.first_step, math.inf
    return case.first_step, max(case.resolved_step or 0, case.step)


def _urgency(severity: str) -> int:
    return SEVERITIES.index(severity) if severity in SEVERITIES else -1
