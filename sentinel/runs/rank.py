"""One rank of an attempt, and how its process ended."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sentinel import wire
from sentinel.flight import Flight
from sentinel.heartbeat import Heartbeat, Stall

RankState = Literal["live", "lost", "gone"]


class Ending(msgspec.Struct, frozen=True):
    """How the process of a rank ended."""

    time: float
    """Monotonic seconds."""
    status: int | None
    """The exit status of the process, a signal negative; None: not known."""
    oom: bool
    """Whether its cgroup counts an out-of-memory kill since it began."""


class Rank:
    """One rank of an attempt."""

    def __init__(self, hello: wire.Hello, now: float) -> None:
        self.hello = hello
        self.state: RankState = "live"
        self.heard = now
        self.last_seq = hello.next_seq - 1
        self.dropped = 0
        self.process = 0
        """pid as this node's kernel knows it; `identity.pid` is what the rank calls itself, maybe in a container."""
        self.phase = ""
        self.pace = wire.Pace(spacing={}, wanted={}, costs={})
        self.daemon_share = 0.0
        """CPU seconds a second that the daemon uses for it."""
        self.snapshots: set[int] = set(hello.snapshots)
        self.goodbye: wire.Goodbye | None = None
        self.ending: Ending | None = None
        self.heartbeat: Heartbeat | None = None
        self.stall = Stall()
        self.dump = ""
        """Its stacks, when it stalled last: text of faulthandler."""
        self.flight: Flight | None = None
        """Its collectives when it stalled last."""
        self.collected: dict[str, Any] = {}
        """Evidence of an incident, the newest of each kind (`sentinel.collected`)."""

    @property
    def identity(self) -> wire.Identity:
        return self.hello.identity
