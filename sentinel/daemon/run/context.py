"""What the parts of a watched run share: the run, its history, and the way to its ranks and their terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sentinel import wire
from sentinel.diagnose.case import Case
from sentinel.runs import RankLink, Run
from sentinel.store import Store


class JobPart(Protocol):
    """A run's part in a job over several nodes, for its incidents and actions."""

    def pass_on_rollback(self) -> None:
        """Have the coordinator learn what is new about a rollback, once the caller has returned."""

    def find_silent_ranks(self) -> Mapping[int, str]:
        """Return the ranks of nodes that are not heard, as `unasked` of `Evidence`."""


class SupervisorTerminals(Protocol):
    """The terminals of jobs' supervisors, which print when no rank can."""

    def print_notice(self, run: Run, notice: wire.Notice) -> None:
        """Print on the terminal of a run's supervisor, if it has one."""


class RunContext:
    """The shared part of one run, for as long as the daemon knows the run."""

    def __init__(
        self, run: Run, store: Store | None, link: RankLink, terminals: SupervisorTerminals | None = None
    ) -> None:
        """`store` is None if no history is kept; `terminals`, if no supervisor can be reached."""
        self.run, self.store, self.link, self._terminals = run, store, link, terminals
        self.job: JobPart | None = None
        """Set while the run is part of a job over several nodes that meet."""
        self._said = set[str]()

    def record_event(self, seq: int, kind: str, **detail: Any) -> None:
        """Write an event of the present attempt into the history."""
        if self.store:
            self.store.records.add_event(self.run.attempt.number, seq, kind, **detail)

    def record_case(self, case: Case) -> None:
        """Write a case into the history as it is now."""
        if self.store:
            self.store.records.put_incident(case.id, case.step, case.builtins())

    def record_job_incident(self, case: Case, own: Sequence[str]) -> None:
        """Write an incident of a job over several nodes into the history as it is now. `own`: ids of this node's cases
        in it."""
        if self.store:
            self.store.records.put_job_incident(case.id, case.step, case.builtins() | {"own": list(own)})

    def print_notice(self, notice: wire.Notice) -> None:
        """Print on the training terminal, through the first rank that is connected."""
        connected = [rank.identity.rank for rank in self.run.attempt.live if not rank.hello.ended]
        if connected:
            self.link.send(min(connected), notice)
        elif self._terminals is not None:
            self._terminals.print_notice(self.run, notice)

    def tell(self, text: str) -> None:
        """Print one line on the training terminal."""
        self.print_notice(wire.Notice(text=f"[sentinel] {text}"))

    def tell_once(self, text: str) -> None:
        """Print one line on the training terminal, unless this run has printed it before."""
        if text not in self._said:
            self._said.add(text)
            self.tell(text)
