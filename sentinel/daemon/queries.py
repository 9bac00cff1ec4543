"""What the command line asks the daemon, over its socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

from sentinel import wire
from sentinel.daemon import survey, views
from sentinel.daemon.server import Peer
from sentinel.daemon.silencing import Silencing
from sentinel.daemon.tenants import Tenants
from sentinel.daemon.watch import Watch


class Queries:
    """Answers them. Each sees the runs of its user alone."""

    def __init__(self, tenants: Tenants, silencing: Silencing, status: Callable[[], dict[str, Any]]) -> None:
        """`status` is what the daemon says of itself."""
        self._tenants, self._silencing, self._status = tenants, silencing, status
        self._tasks: set[asyncio.Task[None]] = set()

    def answer(self, peer: Peer, query: wire.Query, watches: Iterable[Watch]) -> None:
        """Answer now, or as soon as the histories are read."""
        visible = self._tenants.visible(watches, peer.uid)
        match query.what:
            case "status":
                peer.send(wire.Answer(ok=True, content=views.status(visible) | self._status()))
            case "hang":
                peer.send(wire.Answer(ok=True, content=survey.surveyed(visible, time.monotonic())))
            case "incidents":
                self._tasks.add(task := asyncio.create_task(self._incidents(peer, visible)))
                task.add_done_callback(self._tasks.discard)
            case "silence":
                peer.send(self._silencing.answer(peer.uid, query.arguments))
            case other:
                peer.send(wire.Answer(ok=False, reason=f"unknown query {other!r}"))

    async def _incidents(self, peer: Peer, watches: list[Watch]) -> None:
        """Of the live runs, and of those whose histories nobody but us can read."""
        live = views.incidents(watches)
        ended = await asyncio.to_thread(self._tenants.ended, peer.uid, {watch.run.run_id for watch in watches})
        peer.send(wire.Answer(ok=True, content=ended + live))
