"""The daemon's front: HTTP and the files that say where it is. Starts after the ingest, and a fault in it stays in it.

Without it, where no port can be had or `[daemon] http = "off"`, everything else goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sentinel.config import settings as config
from sentinel.daemon import views
from sentinel.daemon.discovery import Presence
from sentinel.daemon.faults import FaultCounter
from sentinel.daemon.watched_run import WatchedRun
from sentinel.notify.deadman import Deadman
from sentinel.rulebook.loader import Reloads

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

log = logging.getLogger(__name__)

STALL_SECONDS = 5.0
"""A daemon whose rules have not turned for so long is not healthy. They turn once a second or so."""
END_SECONDS = 3.0


class HttpFrontend:
    """Serves HTTP and announces the daemon. Its `turned` is to be called whenever the rules have been through."""

    def __init__(
        self,
        directory: Path,
        settings: config.DaemonSettings,
        watches: Mapping[str, WatchedRun],
        reload: Callable[[], tuple[str, ...]],
        deadman: Deadman | None = None,
    ) -> None:
        self.address = ""
        """Host and port, once it listens."""
        self.trouble = ""
        """Why there is no HTTP, where there should be."""
        self.reloads = Reloads()
        self._settings, self._watches, self._reload = settings, watches, reload
        self._deadman = deadman
        self._presence = Presence(directory, settings.file_sd)
        self._faults = FaultCounter()
        self._collector: Any = None
        self._turned = time.monotonic()
        self._server: Any = None

    async def serve(self) -> None:
        """Serve until `close`. Never raises."""
        logging.getLogger().addHandler(self._faults)
        try:
            if self._settings.http != "off":
                await self._listen(self._settings.listen, int(self._settings.http))
            self._presence.announce(self.address)
            if self._server is not None:
                log.info("http://%s/metrics", self.address)
                await self._server.serve(self._socket)
        except Exception:
            self.trouble = "HTTP failed; the daemon's log says why"
            log.exception("HTTP failed; the rest goes on")

    async def _listen(self, host: str, port: int) -> None:
        # A tenth of a second of imports: on a thread, so that ranks are served meanwhile.
        metrics, http = await asyncio.to_thread(_modules)
        try:
            self._socket = http.listener(port, host)
        except OSError as error:
            self.trouble = f"no HTTP: no port on {host} ({error.strerror})"
            log.error("%s", self.trouble)
            return
        bound, number = self._socket.getsockname()
        self.address = f"{'127.0.0.1' if bound == '0.0.0.0' else bound}:{number}"
        self._collector = metrics.LiveCollector(self._watches, self.reloads, self._faults, self._deadman)
        self._server = http.HttpServer(http.application(self, self._presence.token, http.hosts(host)))

    async def close(self, task: asyncio.Task[None]) -> None:
        """Take the files away, and stop serving. `task` is that of `serve`, wherever it is by now."""
        self.withdraw()
        if self._server is not None and self._server.started:
            self._server.end()
            await asyncio.wait([task], timeout=END_SECONDS)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        logging.getLogger().removeHandler(self._faults)

    def withdraw(self) -> None:
        """Take the files away."""
        self._presence.withdraw()

    def count_turn(self) -> None:
        """The rules have been through once more."""
        self._turned = time.monotonic()

    def status(self) -> dict[str, Any]:
        """What `sentinel status` shows of it."""
        trouble = [*filter(None, [self.trouble]), *self.reloads.mistakes]
        heartbeat = self._deadman.status() if self._deadman is not None else None
        return {"http": self.address, "trouble": trouble, "heartbeat": heartbeat}

    # web.http.Backend

    def unhealthy(self) -> str:
        still = time.monotonic() - self._turned
        return f"the rules have not turned for {still:.0f} s" if still > STALL_SECONDS else ""

    def unready(self) -> str:
        if not any(watch.run.attempt.live for watch in self._watches.values()):
            return "no run is connected"
        return (
            "" if any(watch.run.attempt.recent for watch in self._watches.values()) else "no step has been reported yet"
        )

    def reload(self) -> tuple[str, ...]:
        return self._reload()

    def view(self, what: str) -> Any:
        watches = list(self._watches.values())
        return views.incidents(watches) if what == "incidents" else views.status(watches) | self.status()

    def style(self) -> str:
        from sentinel.report.chart import STYLE

        return STYLE

    def live(self, run_id: str) -> Callable[[], str]:
        from sentinel.report import live, live_page

        watch = self._watch(run_id)
        if watch is None:
            return lambda: live_page.fragment(None, {}, [])
        cases = views.incidents([watch])
        undone = [(outcome.to, outcome.at) for outcome in watch.actions.rollback.done if outcome.ok]
        content = live.report(watch.run.name, watch.run.run_id, watch.run.attempt, cases, undone)
        (status,) = views.status([watch])["runs"]
        runs = [(one.run.run_id, one.run.name) for one in self._watches.values()]
        return lambda: live_page.fragment(content, status, runs)

    def whole(self, run_id: str) -> Callable[[], str]:
        from sentinel.report import live_page

        watch = self._watch(run_id)
        path = watch.store.path if watch and watch.store else None
        return lambda: live_page.whole(path)

    def _watch(self, run_id: str) -> WatchedRun | None:
        """The run, or the first."""
        return next((one for one in self._watches.values() if one.run.run_id == run_id), None) or next(
            iter(self._watches.values()), None
        )

    def families(self) -> Iterator[Metric]:
        found: Iterator[Metric] = self._collector.collect()
        return found


def _modules() -> tuple[ModuleType, ModuleType]:
    from sentinel.daemon import metrics
    from sentinel.web import http

    return metrics, http
