"""The daemon's front: HTTP and the files that say where it is. Starts after the ingest, and a fault in it stays in it.

Without it, where no port can be had or `[daemon] http = "off"`, everything else goes on.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import Metric

from sentinel import config
from sentinel.daemon import views
from sentinel.daemon.presence import Presence
from sentinel.daemon.watch import Watch
from sentinel.metrics import LiveCollector, Reloads

log = logging.getLogger(__name__)

STALL_SECONDS = 5.0
"""A daemon whose rules have not turned for so long is not healthy. They turn four times a second."""
END_SECONDS = 3.0


class Front:
    """See above. `turned` is called whenever the rules have been through."""

    def __init__(
        self,
        directory: Path,
        settings: config.Daemon,
        watches: Mapping[str, Watch],
        reload: Callable[[], tuple[str, ...]],
    ) -> None:
        self.address = ""
        """Host and port, once it listens."""
        self.trouble = ""
        """Why there is no HTTP, where there should be."""
        self.reloads = Reloads()
        self._settings, self._watches, self._reload = settings, watches, reload
        self._presence = Presence(directory, settings.file_sd)
        self._collector = LiveCollector(watches, self.reloads)
        self._turned = time.monotonic()
        self._server: Any = None

    async def serve(self) -> None:
        """Serve until `close`. Never raises."""
        try:
            if self._settings.http != "off":
                await self._listen(int(self._settings.http))
            self._presence.announce(self.address)
            if self._server is not None:
                log.info("http://%s/metrics", self.address)
                await self._server.serve(sockets=[self._socket])
        except Exception:
            self.trouble = "HTTP failed; the daemon's log says why"
            log.exception("HTTP failed; the rest goes on")

    async def _listen(self, port: int) -> None:
        # A tenth of a second of imports: on a thread, so that ranks are served meanwhile.
        http = await asyncio.to_thread(importlib.import_module, "sentinel.web.http")
        try:
            self._socket = http.listener(port)
        except OSError as error:
            self.trouble = f"no HTTP: no port on 127.0.0.1 ({error.strerror})"
            log.error("%s", self.trouble)
            return
        self.address = "{}:{}".format(*self._socket.getsockname())
        self._server = http.HttpServer(http.application(self, self._presence.token))

    async def close(self, task: asyncio.Task[None]) -> None:
        """Stop serving, and take the files away. `task` is that of `serve`, wherever it is by now."""
        if self._server is not None and self._server.started:
            self._server.should_exit = True
            await asyncio.wait([task], timeout=END_SECONDS)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.withdraw()

    def withdraw(self) -> None:
        """Take the files away."""
        self._presence.withdraw()

    def turned(self) -> None:
        """The rules have been through once more."""
        self._turned = time.monotonic()

    # web.http.Backend

    def unhealthy(self) -> str:
        still = time.monotonic() - self._turned
        return f"the rules have not turned for {still:.0f} s" if still > STALL_SECONDS else ""

    def unready(self) -> str:
        if not any(watch.attempt.live for watch in self._watches.values()):
            return "no run is connected"
        return "" if any(watch.attempt.recent for watch in self._watches.values()) else "no step has been reported yet"

    def reload(self) -> tuple[str, ...]:
        return self._reload()

    def view(self, what: str) -> Any:
        watches = list(self._watches.values())
        return views.incidents(watches) if what == "incidents" else views.status(watches)

    def families(self) -> list[Metric]:
        return self._collector.families()
