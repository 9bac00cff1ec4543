"""The cases of one run, one for each incident: stored in the history first, then reported."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from sentinel.daemon.run.context import RunContext
from sentinel.diagnose import case as cases
from sentinel.diagnose import folding
from sentinel.diagnose.case import Case
from sentinel.engine import Incident
from sentinel.notify.notifier import Notifier
from sentinel.runs import Attempt

log = logging.getLogger(__name__)

CASES = 1000
"""Cases kept in memory, at some 20 kB each: the open ones, and the newest. The history has all."""
TOLD_AGAIN = 20
"""The most cases whose notices are sent again to a first rank that comes back."""


class IncidentLog:
    """The cases of one run: `cases`, by their ids, in the order in which they were opened."""

    def __init__(self, context: RunContext, notifier: Notifier) -> None:
        self.cases: dict[str, Case] = {}
        self.fired: Counter[tuple[str, str]] = Counter()
        """Number of all cases so far, by alert and severity."""
        self._context, self._run, self._notifier = context, context.run, notifier

    def add(self, found: Iterable[Case]) -> None:
        """Keep these cases in memory, and drop the oldest ones that are over."""
        for case in found:
            self.cases[case.id] = case
            self.fired[case.alert, case.severity] += 1
        over = (identity for identity, case in self.cases.items() if case.state != "firing")
        for identity in [*itertools.islice(over, max(len(self.cases) - CASES, 0))]:
            del self.cases[identity]

    def add_sent(self) -> None:
        """Add the open cases that receivers got, or are to get, and that are not known otherwise: an alert that was
        raised must end, even if the history cannot be read."""
        for entry in self._notifier.pipeline.entries:
            unknown = (case for identity, case in entry.cases.items() if identity not in self.cases)
            if not entry.run_id:  # otherwise it is the job's, and its nodes decide
                self.add([msgspec.structs.replace(case) for case in unknown if case.state == "firing"])

    def find_case(self, incident: Incident) -> Case | None:
        """Return the case of an incident of the present attempt."""
        return self.cases.get(self._identity(incident))

    def present(self) -> Iterator[Case]:
        """Return the cases of the present attempt."""
        return (case for case in self.cases.values() if case.attempt == self._run.attempt.number)

    def open_case(self, incident: Incident) -> Case:
        """Make, store and report the case of an alert that fired."""
        case = cases.open_case(self._run, self._find_attempt(), incident, self._find_silent_ranks())
        case.id = self._identity(incident)
        self._name_nodes(case)
        self._fold(case)
        self.add([case])
        self._notifier.open_case(case)
        log.warning("%s %s at step %d: %s", case.severity, case.alert, case.step, case.summary)
        self._context.record_case(case)
        return case

    def update_case(self, case: Case, incident: Incident) -> None:
        """Update a case whose incident has more members, or is over."""
        cases.update_case(case, incident, self._find_attempt())
        self._name_nodes(case)

    def _fold(self, case: Case) -> None:
        """Find out whether a case is a consequence of a known one."""
        parent = folding.find_parent(case, self.cases.values())
        case.parent = parent.id if parent else ""
        case.problem_id = parent.problem_id if parent else case.id if case.problem else ""
        self._explain(case)

    def _explain(self, case: Case) -> None:
        """Explain a case by its parent, and it and the other cases of its problem by each other."""
        if (parent := self.cases.get(case.parent)) is not None:
            case.diagnosis = folding.explain_consequence(case, parent)
        for member in [other for other in self.cases.values() if other is not case and _is_one_problem(other, case)]:
            case.diagnosis = folding.explain_effect(case, member)
            found = folding.explain_effect(member, case)
            if found is not member.diagnosis:
                member.diagnosis = found
                self.record_change(member)

    def release_consequences(self, parent: Case) -> None:
        """Release the consequences of an incident that is over: one becomes independent, and parent of the others."""
        successor = folding.find_successor(parent, self.cases.values())
        if successor is None:
            return
        for case in self.cases.values():
            if case.parent == parent.id and case.state == "firing":
                case.parent = "" if case is successor else successor.id
                self.record_change(case)

    def _find_silent_ranks(self) -> Mapping[int, str]:
        return self._context.job.find_silent_ranks() if self._context.job is not None else {}

    def _add_evidence(self, case: Case, incident: Incident) -> None:
        """Diagnose a case again. A consequence whose cause turns out to be another problem's is released."""
        was = case.problem
        cases.add_evidence(case, incident, self._find_attempt(), self._find_silent_ranks())
        self._name_nodes(case)
        if case.problem != was and case.parent:
            former = case.problem_id
            self._fold(case)
            if case.problem_id != former:
                self._notifier.separate_case(case)
        else:
            self._explain(case)
        for member in [other for other in self.cases.values() if other.parent == case.id]:
            said = member.diagnosis
            self._explain(member)
            if member.diagnosis is not said:
                self.record_change(member)

    def record_change(self, case: Case) -> None:
        """Store and report a case that was changed by something else than its rule: an action, or folding."""
        self._context.record_case(case)
        self._notifier.change_case(case)

    def add_stacks(self, incidents: Iterable[Incident], action: str) -> None:
        """Add a rank's stacks that arrived after the alert that asked for them by `action`."""
        for incident in incidents:
            case = self.find_case(incident)
            if case is not None and incident.state == "firing" and action in incident.actions:
                self._add_evidence(case, incident)
                self._context.record_case(case)

    def add_evidence(self, incidents: Iterable[Incident], what: str, seq: int) -> None:
        """Add evidence of step `seq` to cases that want it, and that were not over before that step.

        It arrives after the alert; a batch may hold the end of the alert, too.
        """
        for incident in incidents:
            case = self.find_case(incident)
            ended = incident.resolved_seq if incident.state != "firing" else None
            over = incident.state != "firing" and (ended is None or ended < seq)
            if case is not None and not over and what in incident.evidence:
                self._add_evidence(case, incident)
                self.record_change(case)

    def explain_unknown(self, incidents: Iterable[Incident]) -> None:
        """Diagnose firing incidents again whose cause is not known."""
        for incident in incidents:
            case = self.find_case(incident)
            if case is not None and incident.state == "firing" and case.diagnosis.confidence == "none":
                self._add_evidence(case, incident)
                if case.diagnosis.confidence != "none":
                    self.record_change(case)

    def close_former(self) -> None:
        """Close the cases that an earlier attempt left open: they are no longer judged, and no notice repeats."""
        number = self._run.attempt.number
        for case in self.cases.values():
            if case.state == "firing" and case.attempt < number:
                case.state, case.resolved_time = "resolved", time.time()
                case.done = (*case.done, f"over: attempt {number} began")
                self._context.record_case(case)
                self._notifier.tell("resolved", case)

    def tell_again(self) -> None:
        """Send notices again to a first rank that came back: it may have missed some, and knows repeats by id."""
        for case in list(self.present())[-TOLD_AGAIN:]:
            self._notifier.tell_again(case, self.cases.values())

    def _identity(self, incident: Incident) -> str:
        """Return the id of an incident's case: short, and unique in the run's history, over attempts too."""
        return f"{self._run.attempt.number}.{incident.id}"

    def _find_attempt(self) -> Attempt:
        """Return the attempt from which cases are made."""
        return self._run.attempt

    def _name_nodes(self, case: Case) -> None:
        """Do nothing: all members are on this node."""


def find_number(case: Case) -> int:
    """Return the id of the incident that a case of this node is about."""
    return int(case.id.partition(".")[2])


def _is_one_problem(case: Case, other: Case) -> bool:
    return bool(case.problem_id) and case.problem_id == other.problem_id
