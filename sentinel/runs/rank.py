"""One rank of an attempt, and how its process ended."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from sentinel import wire
from sentinel.wire.flight_recorder import Flight
from sentinel.wire.heartbeat_page import Heartbeat, Stall

RankState = Literal["live", "lost", "gone"]
RANK_MARKS = {"live": "o", "silent": "s", "stalled": "=", "lost": "X", "gone": "-"}
"""State -> a letter, so that many ranks can be read without colour. Silent and stalled ranks are live, too."""
SNAPSHOTS = 4096
"""Snapshots that a rank is taken to hold, at most, the newest ones: as many as a hello may list."""


class Ending(msgspec.Struct, frozen=True):
    """How the process of a rank ended."""

    time: float
    """Monotonic seconds."""
    status: int | None
    """The exit status of the process, a signal negative; None: not known."""
    oom: bool
    """Whether its cgroup has counted an out-of-memory kill since the process began."""


class Rank:
    """One rank of an attempt."""

    def __init__(self, hello: wire.Hello, now: float) -> None:
        self.hello = hello
        self.state: RankState = "live"
        self.heard = now
        self.last_seq = hello.next_seq - 1
        self.dropped = self.skipped = 0
        self.process = 0
        """The pid as this node's kernel knows it; `identity.pid` may be that inside a container."""
        self.phase = ""
        self.pace = wire.Pace(spacing={}, wanted={}, costs={})
        self.daemon_share = 0.0
        """CPU seconds per second that the daemon uses for it."""
        self.signals: set[str] = set()
        """Names of all columns that it ever sent."""
        self.snapshots: set[int] = set(hello.snapshots)
        self.goodbye: wire.Goodbye | None = None
        self.ending: Ending | None = None
        self.heartbeat: Heartbeat | None = None
        self.stall = Stall()
        self.standing = False
        """Whether it has stood still for so long that it counts as stalled."""
        self.dump = ""
        """Its stacks when it stalled last: text of faulthandler."""
        self.flight: Flight | None = None
        """Its collectives when it stalled last."""
        self.collected: dict[str, Any] = {}
        """Evidence of incidents by kind, the newest of each (`sentinel.wire.evidence`)."""

    def hold_snapshot(self, seq: int, void: Iterable[int]) -> None:
        """Record that the rank took a snapshot, which replaces those in `void`."""
        self.snapshots.add(seq)
        self.snapshots.difference_update(void)
        if len(self.snapshots) > SNAPSHOTS:
            self.snapshots.remove(min(self.snapshots))

    @property
    def identity(self) -> wire.Identity:
        return self.hello.identity
