"""HTTP, and the files that say where it is. It starts after the ingest, and its faults do not affect the rest.

Without it, if no port is free or with `[daemon] http = "off"`, everything else works.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sentinel.config import settings as config
from sentinel.config.otlp import OtlpSettings
from sentinel.daemon.frontend import views
from sentinel.daemon.frontend.discovery import Presence
from sentinel.daemon.frontend.faults import FaultCounter
from sentinel.daemon.frontend.telemetry import Telemetry
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.notify.deadman import Deadman
from sentinel.rulebook.loader import Reloads

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from sentinel.daemon.frontend.metrics import LiveCollector
    from sentinel.report.stored_runs import StoredRuns
    from sentinel.web.assistants import MakeServer

log = logging.getLogger(__name__)

STALL_SECONDS = 5.0
"""Seconds without a round of the rules after which a daemon is unhealthy. A round takes place about once a second."""
END_SECONDS = 3.0
"""Seconds for the server to end."""


class HttpFrontend:
    """Serves HTTP and announces the daemon. Call its `count_turn` after each round of the rules."""

    def __init__(
        self,
        directory: Path,
        settings: config.DaemonSettings,
        watches: Mapping[str, WatchedRun],
        reload: Callable[[], tuple[str, ...]],
        deadman: Deadman | None = None,
        make_assistants: MakeServer | None = None,
        otlp: OtlpSettings | None = None,
    ) -> None:
        self.address = ""
        """Host and port, once it listens."""
        self.trouble = ""
        """Why there is no HTTP although there should be; empty if all is well."""
        self.reloads = Reloads()
        self._settings, self._watches, self._reload = settings, watches, reload
        self._deadman, self._make_assistants = deadman, make_assistants
        self._presence = Presence(directory, settings.file_sd)
        self._faults = FaultCounter()
        self._collector: LiveCollector | None = None
        self.telemetry = Telemetry(otlp, self.families, watches)
        self._turned = time.monotonic()
        self._server: Any = None
        self._stored: StoredRuns | None = None

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
        http = await asyncio.to_thread(_load_http)
        try:
            self._socket = http.listener(port, host)
        except OSError as error:
            self.trouble = f"no HTTP: no port on {host} ({error.strerror})"
            log.error("%s", self.trouble)
            return
        bound, number = self._socket.getsockname()
        self.address = f"{'127.0.0.1' if bound == '0.0.0.0' else bound}:{number}"
        allowed, make_assistants = http.hosts(host), self._make_assistants
        app = http.application(self, self._presence.token, allowed, make_assistants=make_assistants)
        self._server = http.HttpServer(app)

    async def close(self, task: asyncio.Task[None]) -> None:
        """Remove the files and stop serving. `task` is that of `serve`, in whatever state."""
        self.withdraw()
        if self._server is not None and self._server.started:
            self._server.end()
            await asyncio.wait([task], timeout=END_SECONDS)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        logging.getLogger().removeHandler(self._faults)

    def withdraw(self) -> None:
        """Remove the files."""
        self._presence.withdraw()

    def count_turn(self) -> None:
        """Take note of a round of the rules."""
        self._turned = time.monotonic()

    def status(self) -> dict[str, Any]:
        """Return what `sentinel status` shows of HTTP, heartbeats and OTLP."""
        trouble = [*filter(None, [self.trouble]), *self.reloads.mistakes]
        heartbeat = self._deadman.status() if self._deadman is not None else None
        otlp = self.telemetry.status()
        return {"http": self.address, "trouble": trouble, "heartbeat": heartbeat, "otlp": otlp}

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

    async def render_list(self) -> str:
        watched = views.status(self._watches.values())["runs"]
        return await asyncio.to_thread(self._read_stored().make_list, watched)

    async def render_live(self, run_id: str) -> str:
        from sentinel.report import live, live_page

        watch = self._watches.get(run_id)
        if watch is None:
            return await self._read_stored().render_live(run_id)
        cases = views.incidents([watch])
        undone = [(outcome.to, outcome.at) for outcome in watch.actions.rollback.done if outcome.ok]
        state = live.LiveRun(watch.run, cases, undone)
        (status,) = views.status([watch])["runs"]
        return await asyncio.to_thread(lambda: live_page.fragment(state.make_report(), status))

    async def render_whole(self, run_ids: Sequence[str], zoom: tuple[float, float] | None) -> str:
        return await self._read_stored().render_whole(run_ids, zoom)

    def _read_stored(self) -> StoredRuns:
        if self._stored is None:
            from sentinel.report.stored_runs import StoredRuns

            self._stored = StoredRuns(watched=self._watches)
        return self._stored

    def families(self) -> Iterator[Metric]:
        from sentinel.daemon.frontend.metrics import LiveCollector

        if self._collector is None:
            self._collector = LiveCollector(self._watches, self.reloads, self._faults, self._deadman)
        return self._collector.collect()


def _load_http() -> ModuleType:
    importlib.import_module("sentinel.daemon.frontend.metrics")  # it is needed too
    from sentinel.web import http

    return http
