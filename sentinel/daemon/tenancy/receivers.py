"""The receivers of alerts that the settings name, and the notifier of each run that sends to them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from sentinel.config.settings import Settings
from sentinel.daemon.run.context import RunContext
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.daemon.tenancy.silencing import Silencing
from sentinel.daemon.tenancy.tenants import Tenants
from sentinel.notify import Route, attempt
from sentinel.notify.notifier import Notifier
from sentinel.notify.outbox import Outbox
from sentinel.notify.pipeline import Pipeline
from sentinel.notify.receivers.terminal import Terminal, list_shown_severities
from sentinel.notify.routes import make_origin, make_routes

log = logging.getLogger(__name__)


class Receivers:
    """The receivers, which all runs share."""

    def __init__(self, settings: Settings, silencing: Silencing, tenants: Tenants) -> None:
        self._settings, self._silencing, self._tenants = settings, silencing, tenants
        self._routes, self.notes = make_routes(settings)
        """`notes`: receivers that cannot be used, and why."""
        self._tasks: set[asyncio.Task[None]] = set()

    def make_notifier(self, context: RunContext) -> Notifier:
        """Return a new notifier for a run. Its outbox is in the run's history."""
        run, store = context.run, context.store
        outbox = Outbox(store.path if store else None)
        if store:
            store.before_moving = outbox.release
        origin = make_origin(self._settings, run.name, run.run_id, self._tenants.uid(run.run_id))
        pipeline = Pipeline(run.name, run.run_id, self._routes, outbox=outbox, origin=origin)
        pipeline.start()
        terminal = Terminal(context.print_notice, list_shown_severities(self._settings))
        return Notifier(terminal, pipeline, self._silencing.find_silences(run.run_id), context.record_case)

    def replace(self, settings: Settings, watches: Iterable[WatchedRun]) -> None:
        """Replace receivers, routes and grouping, for the present runs, too."""
        former, self._settings = self._routes, settings
        self._routes, self.notes = make_routes(settings)
        for note in self.notes:
            log.error("%s", note)
        for watch in watches:
            run = watch.run
            origin = make_origin(settings, run.name, run.run_id, self._tenants.uid(run.run_id))
            watch.notifier.replace(self._routes, origin, list_shown_severities(settings))
        self._tasks.add(task := asyncio.create_task(_close_routes(former)))
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Close what the receivers hold open."""
        await _close_routes(self._routes)


async def _close_routes(routes: Sequence[Route]) -> None:
    await asyncio.gather(*map(attempt.close, routes))
