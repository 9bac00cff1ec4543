"""Decide for one run where a case is sent: nowhere under a silence, otherwise to the terminal and the receivers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from sentinel.diagnose import folding
from sentinel.diagnose.case import Case
from sentinel.notify import Event, Origin, Route
from sentinel.notify.entry import Entry
from sentinel.notify.pipeline import Pipeline
from sentinel.notify.receivers.terminal import Terminal
from sentinel.notify.silences import Silences


class Outlet(Protocol):
    """A run's way to its receivers."""

    def put(self, case: Case) -> None:
        """Send the case as it is now to the receivers that do not have it yet."""

    def is_known(self, identity: str) -> bool:
        """Return whether a case waits to be sent, or was sent as firing and not as ended."""

    def hurry(self) -> None:
        """Send at once what waits for further changes: the run is over."""

    @property
    def pending(self) -> int:
        """How many messages are not delivered yet."""


class Notifier:
    """Decides where a case is sent. Whether it was sent is stored in the case, and thereby in the history."""

    def __init__(
        self, terminal: Terminal, pipeline: Pipeline, silences: Silences, save: Callable[[Case], None]
    ) -> None:
        """`save` stores a case in the history, as it is sent or silenced."""
        self.pipeline, self.silences = pipeline, silences
        self.outlet: Outlet = pipeline
        """The way to the receivers. In a job over several nodes it decides which node notifies people."""
        self._terminal, self._save = terminal, save
        self._changed: set[str] = set()
        self._ending: dict[str, Case] = {}
        """Id -> ended case whose end was not sent to the receivers yet."""
        self._resumed = False
        self._is_joining = False
        self._former: list[Entry] = []
        """Entries that an earlier daemon of this node still had to send, or to end."""

    def replace(self, routes: Sequence[Route], origin: Origin, severities: frozenset[str]) -> None:
        """Apply new settings: these receivers, and these severities on the terminal. New receivers get what fires."""
        self.pipeline.replace(routes, origin)
        self._terminal.severities = severities
        self._resumed = False

    def begin_joining(self) -> None:
        """Hold back what an earlier daemon of this node sent, or still had to send, until it is known where the job's
        nodes meet. It is the job's: its coordinator may have told people since, or under another key."""
        self._is_joining, self._former = True, self.pipeline.withdraw()

    def end_joining(self) -> None:
        """Go on with what was held back, as the search for the meeting is over. A second call changes nothing."""
        if self._is_joining:
            self._is_joining = False
            self.pipeline.restore(self._former)

    def open_case(self, case: Case) -> None:
        """Decide whether an incident that fired is sent, before it is recorded."""
        self.silences.refresh()  # a run that has just begun has not read the silences yet
        case.silenced = self.silences.find_silence(case)
        case.told = not case.silenced

    def tell(self, event: Event, case: Case, others: Collection[Case] = ()) -> None:
        """Send that an incident fired, is over, or was undone by a rollback; the history has the case already.
        `others`: cases among which are those of the same problem.

        A receiver that got the alert also gets its end, even under a silence: an alarm that was raised must end.
        """
        if case.told:
            self._show(event, case, others)
            self._put(case)

    def tell_again(self, case: Case, others: Collection[Case] = ()) -> None:
        """Send a case again, after a rank came back that may have missed it. Hook and receivers know repeats by their
        ids."""
        if case.told:
            self._show("fired", case, others)
            if case.state != "firing":
                self._show("resolved" if case.state == "resolved" else "rolled_back", case, others)

    def separate_case(self, case: Case) -> None:
        """Send a case that was taken for a consequence, but is a problem of its own, like any other."""
        if case.told:
            self._terminal.show_separate(case)
            self._put(case)

    def _show(self, event: Event, case: Case, others: Collection[Case]) -> None:
        quiet = folding.is_quiet(case, others, self._terminal.has_shown)
        problem = [other for other in others if case.problem_id and other.problem_id == case.problem_id]
        going_on = [other.alert for other in problem if other.state == "firing" and other is not case]
        self._terminal.notify(event, case, quiet=quiet, going_on=going_on)

    def _put(self, case: Case) -> None:
        """Send a case to the receivers. The end of a problem, which may come back, waits until it does not."""
        if case.problem_id and case.state != "firing":
            self._ending[case.id] = case
        else:
            self.outlet.put(case)

    def change_case(self, case: Case) -> None:
        """Note that a member joined, or an action ended. 64 ranks that join one after the other are one update, at the
        next tick."""
        self._changed.add(case.id)

    def tick(self, cases: Iterable[Case], is_over: Callable[[Sequence[Case]], bool] = lambda _: True) -> None:
        """Send what changed, what silences that began or ended affect, and the ends of problems; called several times
        a second. `is_over`: whether these cases of a problem do not come back. They are at least as severe as the
        ended one, since a receiver may know of no less severe case."""
        self.silences.refresh()
        known = list(cases)
        if not self._resumed and not self._is_joining:
            self._resume(known)
        changed, self._changed = self._changed, set()
        for case in known:
            if case.state == "firing":
                self._look(case, case.id in changed, known)
        for case in [*self._ending.values()]:
            alike = [other for other in known if other.problem_id == case.problem_id and other.level >= case.level]
            if is_over(alike) or any(other.state == "firing" for other in alike):
                self.outlet.put(self._ending.pop(case.id))

    def _look(self, case: Case, changed: bool, known: Collection[Case]) -> None:
        silence = self.silences.find_silence(case)
        if not silence and not case.told:
            case.silenced, case.told = "", True
            self._save(case)
            self.tell("fired", case, known)
        elif silence != case.silenced:
            case.silenced = silence
            self._save(case)
            self.outlet.put(case)
        elif changed and not silence:
            self.tell("updated", case)

    def _resume(self, cases: list[Case]) -> None:
        """Send what the outbox lacks of cases that were sent, after a restart or with other receivers."""
        self._resumed = True
        for case in cases:
            if case.told and (case.state == "firing" or self.outlet.is_known(case.id)):
                self._put(case)
