"""Runs by their ids, each with its present attempt: which start of which run a rank belongs to."""

from __future__ import annotations

from collections.abc import Iterator

from sentinel import wire
from sentinel.errors import ProtocolError
from sentinel.runs.attempt import Attempt
from sentinel.runs.rank import Rank


class Run:
    """One run: its attempts, the last of which is the present one."""

    def __init__(self, name: str, run_id: str, now: float) -> None:
        self.name, self.run_id = name, run_id
        self.attempt = Attempt(0, now)
        self.began = 0.0
        """Unix seconds of the first attach."""

    def hello(self, hello: wire.Hello, now: float) -> tuple[Rank, bool]:
        """Add the rank of a hello. Return it, and whether a new attempt began with it.

        A rank that comes back with the same session only lost its connection. One with another session was started or
        attached again: the first such rank opens the attempt, the others follow into it. Raises ProtocolError for a
        rank of an attempt that is over.
        """
        identity, current = hello.identity, self.attempt
        began = self.begins_attempt(identity)
        if not current.ranks:
            current.number = max(identity.attempt, current.number)
        if began and current.ranks:
            self.attempt = Attempt(max(identity.attempt, current.number + 1), now)
        return self.attempt.hello(hello, now), began

    def begins_attempt(self, identity: wire.Identity) -> bool:
        """Whether a rank's hello begins a new attempt. Raises ProtocolError for a rank of an attempt that is over."""
        current = self.attempt
        known = current.ranks.get(identity.rank)
        again = known is not None and known.identity.session != identity.session
        restarts = max((rank.identity.attempt for rank in current.ranks.values()), default=identity.attempt)
        if identity.attempt < restarts and (known is None or again):
            raise ProtocolError(f"attempt {identity.attempt} of {self.name} is over: attempt {current.number} runs")
        return not current.ranks or identity.attempt > restarts or again


class Runs:
    """All runs that a daemon serves."""

    def __init__(self) -> None:
        self._runs: dict[str, Run] = {}

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())

    def find_run(self, identity: wire.Identity, now: float) -> Run:
        """Return the run that a rank belongs to; it is created at its first hello."""
        if identity.run_id not in self._runs:
            name = "".join(c if c.isprintable() else " " for c in identity.run)  # no control sequences for a terminal
            self._runs[identity.run_id] = Run(name, identity.run_id, now)
        return self._runs[identity.run_id]

    def forget(self, run_id: str) -> None:
        """Forget a run that has ended."""
        self._runs.pop(run_id, None)
