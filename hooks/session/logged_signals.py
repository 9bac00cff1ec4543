"""Signals from outside: logged by a script or measured by other packages' probes.

Their names may show that the run is reinforcement learning.
"""

from __future__ import annotations

from collections.abc import Mapping

from sentinel.hooks.core.identity import printable
from sentinel.naming import find_rl_columns
from sentinel.signals import SIGNALS
from sentinel.text import join_names

NAMES = 1024
"""Largest number of such names: a loop that makes a new one at every step must not grow the hello."""
RL = "rl"
KINDS = (RL, "supervised")
JUDGED_AS = "reinforcement learning"


class LoggedSignals:
    """Names and scopes of signals from outside, and the kind of run."""

    def __init__(self, kind: str | None) -> None:
        """`kind`: one of `KINDS`, as the user says; None: recognised by what is logged."""
        self.scopes: dict[str, str] = {}
        self._kind, self._names_judged = kind, 0
        self.judged_as = JUDGED_AS + ', by attach(kind="rl")' if kind == RL else ""
        """In words, what the run is judged as; empty for an ordinary run."""

    @property
    def reinforcement(self) -> bool:
        """Whether the user says that the run is reinforcement learning, or its names have shown it."""
        return self._kind == RL

    def declare(self, signals: Mapping[str, str]) -> None:
        """Add signals of other packages' probes, with their scopes."""
        self.scopes.update(signals)

    def knows(self, name: str) -> bool:
        """Whether the name is a signal of ours, or was logged before."""
        return name in SIGNALS or name in self.scopes

    def add(self, name: str) -> bool:
        """Add a new name. Returns False if it cannot be taken."""
        if len(self.scopes) >= NAMES or name != printable(name):
            return False
        self.scopes[name] = "rank"
        return True

    def recognise_kind(self) -> bool:
        """Return whether new names show that the run is reinforcement learning.

        Called at the end of a step: names that a trainer logs together are judged together.
        """
        if len(self.scopes) == self._names_judged or self._kind is not None:
            return False
        self._names_judged = len(self.scopes)
        columns = find_rl_columns(self.scopes)
        if columns:
            self._kind, self.judged_as = RL, f"{JUDGED_AS}, by {join_names(columns, 4)}"
        return bool(columns)
