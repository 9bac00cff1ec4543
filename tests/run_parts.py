"""Parts of a run that is watched, for tests that need no daemon around it."""

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
    """A way to ranks that keeps what is sent to them."""

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
    """Incidents of a run without any, and what actions said to them."""

    def __init__(self) -> None:
        self.evidence: list[str] = []

    def list_asking(self, action: str) -> Iterable[Case]:
        return ()

    def record_action(self, case: Case) -> None: ...

    def add_stacks(self) -> None: ...

    def add_evidence(self, what: str, seq: int) -> None:
        self.evidence.append(what)

    def preserve(self) -> None: ...


class EndedRollbacks:
    """Keeps how rollbacks ended."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.done: list[tuple[str, bool]] = []
        """What the case says of each, and whether it is ok."""

    def end_rollback(self, case: Case, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.done.append((case.done[-1], outcome.ok))


def watch_run(
    run: Run, rules: Sequence[Rule] = (), store: Store | None = None, link: RankLink | None = None, notifier: Any = None
) -> WatchedRun:
    """A run under watch; without a `link` its ranks hear nothing, without a `notifier` nobody does."""
    context = RunContext(run, store, link or NoRanks())
    return WatchedRun(context, notifier or make_silent_notifier(context), rules)
