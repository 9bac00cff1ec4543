"""The receivers of alerts, as the settings have them, and each run's way to them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from sentinel import wire
from sentinel.config import Settings
from sentinel.daemon.silencing import Silencing
from sentinel.daemon.watched_run import WatchedRun
from sentinel.diagnose.case import Case
from sentinel.notify import Route, attempt, receivers
from sentinel.notify.notifier import Notifier
from sentinel.notify.outbox import Outbox
from sentinel.notify.pipeline import Pipeline
from sentinel.notify.terminal import Terminal
from sentinel.runs import Run
from sentinel.store import Store

log = logging.getLogger(__name__)


class Receivers:
    """One set of receivers, which all runs share."""

    def __init__(self, settings: Settings, silencing: Silencing) -> None:
        self._settings, self._silencing = settings, silencing
        self._routes, self.notes = receivers.routes(settings)
        """`notes`: receivers that cannot be used, and why."""
        self._tasks: set[asyncio.Task[None]] = set()

    def notifier(self, run: Run, store: Store | None) -> Callable[..., Notifier]:
        """What makes a run's notifier. Its outbox is in its history."""
        outbox = Outbox(store.path if store else None)
        if store:
            store.before_moving = outbox.release
        link = self._settings.daemon.link(run.name, run.run_id)
        pipeline = Pipeline(run.name, run.run_id, self._routes, outbox=outbox, link=link)
        pipeline.start()
        silences = self._silencing.of(run.run_id)

        def made(show: Callable[[wire.Notice], None], save: Callable[[Case], None]) -> Notifier:
            return Notifier(Terminal(show, receivers.shown(self._settings)), pipeline, silences, save)

        return made

    def replace(self, settings: Settings, watches: Iterable[WatchedRun]) -> None:
        """Other receivers, routes and grouping, for the runs that there are, too."""
        former, self._settings = self._routes, settings
        self._routes, self.notes = receivers.routes(settings)
        for note in self.notes:
            log.error("%s", note)
        for watch in watches:
            link = settings.daemon.link(watch.run.name, watch.run.run_id)
            watch.notifier.replace(self._routes, link, receivers.shown(settings))
        self._tasks.add(task := asyncio.create_task(_closed(former)))
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Close what the receivers hold open."""
        await _closed(self._routes)


async def _closed(routes: Sequence[Route]) -> None:
    await asyncio.gather(*map(attempt.close, routes))
