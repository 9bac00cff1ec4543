"""Answers what the command line asks the daemon over its socket."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable
from typing import Any

import msgspec

from sentinel import wire
from sentinel.daemon.frontend import views
from sentinel.daemon.frontend.http_frontend import HttpFrontend
from sentinel.daemon.ingest.peer import Peer
from sentinel.daemon.job import hang_report
from sentinel.daemon.job import standstill as job_standstill
from sentinel.daemon.job import views as job_views
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.daemon.tenancy.silencing import Silencing
from sentinel.daemon.tenancy.tenants import Tenants

log = logging.getLogger(__name__)


class Queries:
    """Answers the command line's questions. Each user sees only their own runs."""

    def __init__(self, tenants: Tenants, silencing: Silencing, frontend: HttpFrontend) -> None:
        self._tenants, self._silencing, self._frontend = tenants, silencing, frontend
        self._tasks: set[asyncio.Task[None]] = set()

    def answer(self, peer: Peer, query: wire.Query, watches: Iterable[WatchedRun]) -> None:
        """Answer now, or as soon as the histories are read."""
        visible = self._tenants.visible(watches, peer.uid)
        match query.what:
            case "status":
                peer.send(wire.Answer(ok=True, content=views.status(visible) | self._frontend.status()))
            case "hang" if any(watch.membership is not None for watch in visible):
                self._begin(peer, self._survey(visible))
            case "hang":
                if not query.arguments.get("again"):  # otherwise the ranks were asked, and the answers are awaited
                    hang_report.begin_survey(visible, time.monotonic())
                peer.send(wire.Answer(ok=True, content=hang_report.collect_survey(visible)))
            case "incidents":
                self._begin(peer, self._list_incidents(peer.uid, visible))
            case "job_incidents":
                self._begin(peer, _ask_jobs(visible, str(query.arguments.get("id", ""))))
            case "silence":
                peer.send(self._silencing.answer(peer.uid, query.arguments))
            case other:
                peer.send(wire.Answer(ok=False, reason=f"unknown query {other!r}"))

    def _begin(self, peer: Peer, question: Coroutine[Any, Any, Any]) -> None:
        """Answer the peer once this coroutine has returned."""
        self._tasks.add(task := asyncio.create_task(_send_answer(peer, question)))
        task.add_done_callback(self._tasks.discard)

    async def _list_incidents(self, uid: int, watches: list[WatchedRun]) -> list[dict[str, Any]]:
        """Return incidents of the live runs, and of runs whose histories only this daemon can read."""
        live, known = views.incidents(watches), {watch.run.run_id for watch in watches}

        def find_incidents() -> list[dict[str, Any]]:
            ended = self._tenants.list_ended_incidents(uid, known)
            return fitting(sorted(ended + live, key=lambda case: case.get("time", 0.0)))

        return await asyncio.to_thread(find_incidents)

    async def _survey(self, watches: list[WatchedRun]) -> list[dict[str, Any]]:
        """Return where ranks stand, for a job on all its nodes, once all have answered or time is up."""
        return list(await asyncio.gather(*map(_survey_run, watches)))


async def _send_answer(peer: Peer, question: Coroutine[Any, Any, Any]) -> None:
    try:
        peer.send(wire.Answer(ok=True, content=await question))
    except Exception as error:  # without this, the question would get no answer
        log.exception("a question of the command line gets no answer")
        peer.send(wire.Answer(ok=False, reason=f"{type(error).__name__}; the daemon's log says why"))


async def _survey_run(watch: WatchedRun) -> dict[str, Any]:
    if watch.membership is not None:
        return await job_views.survey_job(watch, watch.membership)
    await job_standstill.survey_ranks(watch)
    (report,) = hang_report.collect_survey([watch])
    return report


async def _ask_jobs(watches: list[WatchedRun], identity: str) -> list[dict[str, Any]]:
    """Return incidents of the jobs that runs of this node belong to; with an id, only that one, with its evidence."""
    joined = [(watch, watch.membership) for watch in watches if watch.membership is not None]
    if identity:
        answers = await asyncio.gather(*(job_views.find_incident(*pair, identity) for pair in joined))
    else:
        answers = await asyncio.gather(*(job_views.list_incidents(*pair) for pair in joined))
    room = (wire.FRAME_LIMIT - 4096) // max(len(answers), 1)
    return [answer | {"cases": fitting(answer["cases"], room)} for answer in answers]


def fitting(cases: list[dict[str, Any]], limit: int = wire.FRAME_LIMIT - 4096) -> list[dict[str, Any]]:
    """Return the last cases, as many as fit into one answer of `limit` bytes. The histories have all."""
    for number in range(len(cases) - 1, -1, -1):
        limit -= len(msgspec.msgpack.encode(cases[number]))
        if limit < 0:
            return cases[number + 1 :]
    return cases
