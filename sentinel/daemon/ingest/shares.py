"""What each user has of a daemon: a turn in each round of its loop, and so many connections, bytes and runs.

A node's service serves users who do not know each other. None of them may take the place of the others: each has at
most a quarter of the file descriptors, and of what all connections of one user bring, one frame at a time is handled,
in portions, between which the other users have theirs.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

PORTION_SECONDS = 0.01
"""For which one user's steps are judged before the others have their turn."""
LOOK_SECONDS = 0.02
"""For which one user's runs are ticked in a look at all."""
CONNECTIONS = 4096
HELD_BYTES = 256 * 1024 * 1024
"""Of frames that have begun to arrive."""
RUNS = 48
"""In memory at a time: 2 MB each, and more with many layers. Python's garbage collector stops the daemon for 1.5 ms a
run."""
LAYERS = 2_000
"""Of all runs of a user of a service: of more the layer statistics are not judged. The state of their rules takes 30 us
a layer to pack, in which no other user is served, and 10 kB of memory."""
_USERS = 4
"""How many may use all that they can have, before a service has no descriptor left."""
_OURS = 256
"""Descriptors for all else: files of rules and settings, receivers, 64 connections of HTTP."""
_OF_A_CONNECTION = 7
"""Descriptors: itself, its process, and four that a peer may hand over, of which two are kept; one of its run's
history, which has three."""


class Share:
    """What one user has of the daemon."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        """Held by the task that does this user's work. Tasks get it in the order in which they asked."""
        self.connections = 0
        self.held = 0
        """Bytes of frames that have begun to arrive."""


class Shares:
    """Those of all users."""

    def __init__(self, *, several: bool) -> None:
        """`several`: users who do not know each other. Else all belongs to one."""
        self._shares: dict[int, Share] = {}
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = CONNECTIONS * _OF_A_CONNECTION * _USERS if soft == resource.RLIM_INFINITY else max(soft - _OURS, 64)
        self.connections = min(CONNECTIONS, free // _OF_A_CONNECTION // (_USERS if several else 1))
        """That one user may have at a time."""

    def find_share(self, uid: int) -> Share:
        """This user's."""
        return self._shares.setdefault(uid, Share())


@asynccontextmanager
async def turn(share: Share) -> AsyncIterator[None]:
    """Do a piece of this user's work, once that of all other users has had its turn."""
    async with share.turn:
        await asyncio.sleep(0)
        yield
