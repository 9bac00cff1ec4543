"""The cases of one run, one for each incident: kept in the history first, then told."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from sentinel.diagnose import case as cases
from sentinel.diagnose.case import Case
from sentinel.diagnose.evidence import WANTED
from sentinel.engine import Incident
from sentinel.notify.notifier import Notifier
from sentinel.runs import Run
from sentinel.store import Store

log = logging.getLogger(__name__)

CASES = 1000
"""Cases that are kept in memory, at some 20 kB each: those that are open, and the newest. The history has all."""
TOLD_AGAIN = 20
"""Cases whose notices are sent again to a first rank that comes back."""


class Casebook:
    """The cases of one run. `cases` are by their ids, in the order in which they were opened."""

    def __init__(self, run: Run, store: Store | None, notifier: Callable[[Callable[[Case], None]], Notifier]) -> None:
        """`notifier` is made with what records a case."""
        self.cases: dict[str, Case] = {}
        self.fired: Counter[tuple[str, str]] = Counter()
        """All that there were, by alert and severity."""
        self._run, self._store = run, store
        self.notifier = notifier(self.keep)

    def add(self, found: Iterable[Case]) -> None:
        """Keep these in memory, and let go of the oldest that are over."""
        for case in found:
            self.cases[case.id] = case
            self.fired[case.alert, case.severity] += 1
        over = (identity for identity, case in self.cases.items() if case.state != "firing")
        for identity in [*itertools.islice(over, max(len(self.cases) - CASES, 0))]:
            del self.cases[identity]

    def of(self, incident: Incident) -> Case | None:
        """The case of an incident of the present attempt."""
        return self.cases.get(self._identity(incident))

    def present(self) -> Iterator[Case]:
        """Those of the present attempt."""
        return (case for case in self.cases.values() if case.attempt == self._run.attempt.number)

    def opened(self, incident: Incident) -> Case:
        """An alert fired."""
        case = cases.opened(self._run, self._run.attempt, incident)
        case.id = self._identity(incident)
        self.add([case])
        self.notifier.opened(case)
        log.warning("%s %s at step %d: %s", case.severity, case.alert, case.step, case.summary)
        self.keep(case)
        return case

    def updated(self, case: Case, incident: Incident) -> None:
        """More entities joined, or it is over."""
        cases.updated(case, incident, self._run.attempt)

    def written(self, case: Case) -> None:
        """An action wrote into a case."""
        self.keep(case)
        self.notifier.changed(case)

    def keep(self, case: Case) -> None:
        """Put a case into the history as it is."""
        if self._store:
            self._store.incident(case.id, case.step, case.builtins())

    def dumped(self, incidents: Iterable[Incident], action: str) -> None:
        """A rank's stacks came after the alert that asked for them by `action`."""
        for incident in incidents:
            case = self.of(incident)
            if case is not None and incident.state == "firing" and action in incident.actions:
                cases.informed(case, incident, self._run.attempt)
                self.keep(case)

    def informed(self, incidents: Iterable[Incident], what: str, seq: int) -> None:
        """Evidence of step `seq` came after the alert that wants it; a batch may hold the end of the alert, too."""
        for incident in incidents:
            case = self.of(incident)
            ended = incident.resolved_seq if incident.state != "firing" else None
            over = incident.state != "firing" and (ended is None or ended < seq)
            if case is not None and not over and what in WANTED.get(incident.rule, ()):
                cases.informed(case, incident, self._run.attempt)
                self.written(case)

    def close_former(self) -> None:
        """What an earlier attempt left open is over: nobody judges it any more, and nobody is told of it for ever."""
        number = self._run.attempt.number
        for case in self.cases.values():
            if case.state == "firing" and case.attempt < number:
                case.state, case.resolved_time = "resolved", time.time()
                case.done = (*case.done, f"over: attempt {number} began")
                self.keep(case)
                self.notifier.tell("resolved", case)

    def tell_again(self) -> None:
        """To a first rank that came back: it may have missed notices, and knows by their ids those that it has not."""
        for case in list(self.present())[-TOLD_AGAIN:]:
            self.notifier.tell_again(case)

    def _identity(self, incident: Incident) -> str:
        """Short, and unique in the run's history, over attempts too."""
        return f"{self._run.attempt.number}.{incident.id}"
