"""Signals that are not ours: what a script logs and what probes of other packages measure; and what they tell of the
run, which may be reinforcement learning."""

from __future__ import annotations

from collections.abc import Mapping

from sentinel.hooks.core.identity import printable
from sentinel.naming import find_rl_columns
from sentinel.signals import SIGNALS
from sentinel.text import join_names

NAMES = 1024
"""At most: a loop that makes a new one at every step must not grow the hello."""
RL = "rl"
KINDS = (RL, "supervised")
JUDGED_AS = "reinforcement learning"


class LoggedSignals:
    """Names and scopes of such signals, and the kind of run."""

    def __init__(self, kind: str | None) -> None:
        """`kind`: one of `KINDS`, as the user says; None: found by what is logged."""
        self.scopes: dict[str, str] = {}
        self._kind, self._names_judged = kind, 0
        self.judged_as = JUDGED_AS + ', by attach(kind="rl")' if kind == RL else ""
        """As what the run is judged, in words; empty where it is as any other."""

    @property
    def reinforcement(self) -> bool:
        """Whether it is reinforcement learning."""
        return self._kind == RL

    def declare(self, signals: Mapping[str, str]) -> None:
        """Signals of other packages' probes, and their scopes."""
        self.scopes.update(signals)

    def knows(self, name: str) -> bool:
        """Whether it is a signal of ours, or one that was logged before."""
        return name in SIGNALS or name in self.scopes

    def add(self, name: str) -> bool:
        """A name that is new. False where it cannot be taken."""
        if len(self.scopes) >= NAMES or name != printable(name):
            return False
        self.scopes[name] = "rank"
        return True

    def recognise_kind(self) -> bool:
        """Whether names that are new show that it is reinforcement learning. At the end of a step: what a trainer logs
        together is judged together."""
        if len(self.scopes) == self._names_judged or self._kind is not None:
            return False
        self._names_judged = len(self.scopes)
        columns = find_rl_columns(self.scopes)
        if columns:
            self._kind, self.judged_as = RL, f"{JUDGED_AS}, by {join_names(columns, 4)}"
        return bool(columns)
