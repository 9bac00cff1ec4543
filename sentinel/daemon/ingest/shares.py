"""Each user's share of a daemon: a turn in each round of its loop, and a limit of connections, bytes and runs.

A node's service serves users who do not know each other, and none of them may crowd out the others. Each has at most a
quarter of the file descriptors; of all connections of one user, one frame at a time is handled, in portions, between
which the other users have their turns.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

PORTION_SECONDS = 0.01
"""Seconds for which one user's steps are judged before the others have their turn."""
LOOK_SECONDS = 0.02
"""Seconds for which one user's runs are ticked in one look at all runs."""
CONNECTIONS = 4096
"""Most connections of one user."""
HELD_BYTES = 256 * 1024 * 1024
"""Most bytes of one user's frames that have begun to arrive."""
RUNS = 48
"""Most runs of one user in memory: 2 MB each, and more with many layers. Python's garbage collector stops the daemon
for 1.5 ms per run."""
LAYERS = 2_000
"""Most layers of all runs of a service's user; the layer statistics of further ones are not judged. The state of their
rules takes 30 us a layer to pack, in which no other user is served, and 10 kB of memory."""
_USERS = 4
"""Number of users who may use their whole share before a service has no descriptor left."""
_OURS = 256
"""Descriptors for everything else: files of rules and settings, receivers, 64 connections of HTTP."""
_OF_A_CONNECTION = 7
"""Descriptors per connection: itself, its process, four that a peer may hand over, of which two are kept, and one of
the three of its run's history."""


class Share:
    """One user's share of the daemon."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        """Held by the task that does this user's work. Tasks get it in the order of their requests."""
        self.connections = 0
        self.held = 0
        """Bytes of frames that have begun to arrive."""


class Shares:
    """The shares of all users."""

    def __init__(self, *, several: bool) -> None:
        """`several`: the daemon serves users who do not know each other; otherwise one user has it all."""
        self._shares: dict[int, Share] = {}
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = CONNECTIONS * _OF_A_CONNECTION * _USERS if soft == resource.RLIM_INFINITY else max(soft - _OURS, 64)
        self.connections = min(CONNECTIONS, free // _OF_A_CONNECTION // (_USERS if several else 1))
        """Most connections that one user may have at a time."""

    def find_share(self, uid: int) -> Share:
        """Return the share of a user."""
        return self._shares.setdefault(uid, Share())


@asynccontextmanager
async def turn(share: Share) -> AsyncIterator[None]:
    """Do a piece of this user's work after all other users have had their turn."""
    async with share.turn:
        await asyncio.sleep(0)
        yield
