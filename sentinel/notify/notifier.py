"""Decides for one run who is told of a case: nobody under a silence; else the training terminal, and the receivers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from sentinel.diagnose.case import Case
from sentinel.notify import Event, Route
from sentinel.notify.pipeline import Pipeline
from sentinel.notify.silences import Silences
from sentinel.notify.terminal import Terminal


class Notifier:
    """Decides who is told of a case. Whether it was told is in the case, and thereby in the history."""

    def __init__(
        self, terminal: Terminal, pipeline: Pipeline, silences: Silences, save: Callable[[Case], None]
    ) -> None:
        """`save` records a case: here, that it is told, or silenced."""
        self.pipeline, self.silences = pipeline, silences
        self._terminal, self._save = terminal, save
        self._changed: set[str] = set()
        self._resumed = False

    def replace(self, routes: Sequence[Route], link: str, severities: frozenset[str]) -> None:
        """Other settings: these receivers, and on the terminal these severities. What fires is told to who is new."""
        self.pipeline.replace(routes, link)
        self._terminal.severities = severities
        self._resumed = False

    def opened(self, case: Case) -> None:
        """An incident fired: decide whether people are told, before it is recorded."""
        case.silenced = self.silences.of(case)
        case.told = not case.silenced

    def tell(self, event: Event, case: Case) -> None:
        """An incident fired, is over, or was undone by a rollback; the case is in the history by now.

        Who was told that it fired is told of its end, under a silence too: an alarm that was raised must end.
        """
        if case.told:
            self._terminal.notify(event, case)
            self.pipeline.put(case)

    def tell_again(self, case: Case) -> None:
        """A rank came back, and may have missed it. Its hook knows by the ids of notices; the receivers are told."""
        if case.told:
            self._terminal.notify("fired", case)
            if case.state != "firing":
                self._terminal.notify("resolved" if case.state == "resolved" else "rolled_back", case)

    def changed(self, case: Case) -> None:
        """A member joined, or an action ended. 64 ranks that join one after the other are one update, at the tick."""
        self._changed.add(case.id)

    def tick(self, cases: Iterable[Case]) -> None:
        """Several times a second: what changed, and silences that began or ended."""
        self.silences.refresh()
        known = list(cases)
        if not self._resumed:
            self._resume(known)
        changed, self._changed = self._changed, set()
        for case in known:
            if case.state == "firing":
                self._look(case, case.id in changed)

    def _look(self, case: Case, changed: bool) -> None:
        silence = self.silences.of(case)
        if not silence and not case.told:
            case.silenced, case.told = "", True
            self._save(case)
            self.tell("fired", case)
        elif silence != case.silenced:
            case.silenced = silence
            self._save(case)
            self.pipeline.put(case)
        elif changed and not silence:
            self.tell("updated", case)

    def _resume(self, cases: list[Case]) -> None:
        """After a restart, or with other receivers: what the outbox does not know yet of cases that were told."""
        self._resumed = True
        for case in cases:
            if case.told and (case.state == "firing" or self.pipeline.known(case.id)):
                self.pipeline.put(case)
