"""What the command line asks the daemon, over its socket."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from sentinel import wire
from sentinel.daemon import hang_report, views
from sentinel.daemon.http_frontend import HttpFrontend
from sentinel.daemon.peer import Peer
from sentinel.daemon.silencing import Silencing
from sentinel.daemon.tenants import Tenants
from sentinel.daemon.watched_run import WatchedRun

log = logging.getLogger(__name__)


class Queries:
    """Answers the command line's questions. Each sees the runs of its user alone."""

    def __init__(self, tenants: Tenants, silencing: Silencing, frontend: HttpFrontend) -> None:
        self._tenants, self._silencing, self._frontend = tenants, silencing, frontend
        self._tasks: set[asyncio.Task[None]] = set()

    def answer(self, peer: Peer, query: wire.Query, watches: Iterable[WatchedRun]) -> None:
        """Answer now, or as soon as the histories are read."""
        visible = self._tenants.visible(watches, peer.uid)
        match query.what:
            case "status":
                peer.send(wire.Answer(ok=True, content=views.status(visible) | self._frontend.status()))
            case "hang":
                if not query.arguments.get("again"):  # else one who asks waits for the answers to that question
                    hang_report.begin_survey(visible, time.monotonic())
                peer.send(wire.Answer(ok=True, content=hang_report.collect_survey(visible)))
            case "incidents":
                self._tasks.add(task := asyncio.create_task(self._incidents(peer, visible)))
                task.add_done_callback(self._tasks.discard)
            case "silence":
                peer.send(self._silencing.answer(peer.uid, query.arguments))
            case other:
                peer.send(wire.Answer(ok=False, reason=f"unknown query {other!r}"))

    async def _incidents(self, peer: Peer, watches: list[WatchedRun]) -> None:
        """Of the live runs, and of those whose histories nobody but us can read."""
        live, known = views.incidents(watches), {watch.run.run_id for watch in watches}

        def find_incidents() -> list[dict[str, Any]]:
            return fitting(
                sorted(
                    self._tenants.list_ended_incidents(peer.uid, known) + live, key=lambda case: case.get("time", 0.0)
                )
            )

        try:
            peer.send(wire.Answer(ok=True, content=await asyncio.to_thread(find_incidents)))
        except Exception as error:  # or whoever asks would get no answer
            log.exception("cannot answer a question about incidents")
            peer.send(wire.Answer(ok=False, reason=f"{type(error).__name__}; the daemon's log says why"))


def fitting(cases: list[dict[str, Any]], limit: int = wire.FRAME_LIMIT - 4096) -> list[dict[str, Any]]:
    """The last of them, as many as one answer of `limit` bytes holds. The histories have all."""
    for number in range(len(cases) - 1, -1, -1):
        limit -= len(msgspec.msgpack.encode(cases[number]))
        if limit < 0:
            return cases[number + 1 :]
    return cases
