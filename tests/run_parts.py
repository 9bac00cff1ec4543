"""Parts of a watched run, for tests that need no daemon around it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sentinel import wire
from sentinel.actions.rollback_state import Outcome
from sentinel.daemon.replay import make_silent_notifier
from sentinel.daemon.run.context import RunContext
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.diagnose.case import Case
from sentinel.engine import Rule
from sentinel.runs import NoRanks, RankLink, Run
from sentinel.store import Store


class SentMessages:
    """Stands in for the connections to ranks, and keeps the messages."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, wire.Message]] = []

    def send(self, rank: int, message: wire.Message) -> None:
        self.sent.append((rank, message))

    def interrupt(self, process: int, signal: int) -> bool:
        return False

    @property
    def messages(self) -> list[wire.Message]:
        return [message for _, message in self.sent]


class FakeIncidents:
    """Stands in for the incidents of a run without any, and keeps the evidence that actions add."""

    def __init__(self) -> None:
        self.evidence: list[str] = []

    def list_asking(self, action: str) -> Iterable[Case]:
        return ()

    def record_change(self, case: Case) -> None: ...

    def add_stacks(self) -> None: ...

    def add_evidence(self, what: str, seq: int) -> None:
        self.evidence.append(what)

    def preserve(self) -> None: ...


class EndedRollbacks:
    """Keeps the outcomes of rollbacks."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.done: list[tuple[str, bool]] = []
        """For each, the case's last text about it, and whether it succeeded."""

    def will_stop(self, case: Case) -> bool:
        return False

    def end_rollback(self, case: Case, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.done.append((case.done[-1], outcome.ok))


def watch_run(
    run: Run, rules: Sequence[Rule] = (), store: Store | None = None, link: RankLink | None = None, notifier: Any = None
) -> WatchedRun:
    """Watch a run; without a `link` its ranks get no messages, without a `notifier` no receiver does."""
    context = RunContext(run, store, link or NoRanks())
    return WatchedRun(context, notifier or make_silent_notifier(context), rules)
