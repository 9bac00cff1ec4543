"""A dead man's switch: a server elsewhere is told at each interval that all is watched, and raises the alarm where that
stays away. It is not told while the daemon is blind; and this runs on the loop that judges the steps, so that it cannot
outlive that.

Any server that takes a POST: healthchecks.io, Better Stack, Opsgenie heartbeats, Dead Man's Snitch, Uptime Kuma.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from sentinel.config.settings import HeartbeatSettings
from sentinel.errors import ConfigError
from sentinel.notify import Delivery
from sentinel.notify.http import Poster

log = logging.getLogger(__name__)


class Deadman:
    """`serve` runs until it is cancelled; `replace` at other settings."""

    def __init__(self, settings: HeartbeatSettings | None, blind: Callable[[], str]) -> None:
        """`blind` says why the daemon does not see what it should; empty where it does."""
        self._settings, self._blind = settings, blind
        self._changed = asyncio.Event()
        self._poster: Poster | None = None
        self.sent = self.withheld = self.failed = 0
        self.trouble = ""
        """Why the last one was not sent, or did not arrive."""

    def replace(self, settings: HeartbeatSettings | None) -> None:
        """From now on."""
        self._settings = settings
        self._changed.set()

    async def serve(self) -> None:
        """Until it is cancelled. Never raises."""
        try:
            while True:
                self._changed.clear()
                if self._settings is not None:
                    await self._beat(self._settings)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.interval if self._settings else None):
                        await self._changed.wait()
        finally:
            if self._poster is not None:
                await self._poster.close()

    def status(self) -> dict[str, Any] | None:
        """None: there is no heartbeat in the settings."""
        if self._settings is None:
            return None
        return {"sent": self.sent, "withheld": self.withheld, "failed": self.failed, "trouble": self.trouble}

    async def _beat(self, settings: HeartbeatSettings) -> None:
        former, blind = self.trouble, self._blind()
        if blind:
            self.withheld += 1
            self.trouble = f"withheld: {blind}"
        else:
            delivery = await self._send_ping(settings)
            self.sent += delivery.fault is None
            self.failed += delivery.fault is not None
            self.trouble = delivery.detail
        if self.trouble != former:
            log.warning("heartbeat: %s", self.trouble or "sent again")

    async def _send_ping(self, settings: HeartbeatSettings) -> Delivery:
        try:
            url, headers = settings.address(), settings.authorization()
            if self._poster is None:
                self._poster = Poster(settings.timeout)
            async with asyncio.timeout(settings.timeout):
                return await self._poster.post(url, b"{}", headers)
        except ConfigError as error:
            return Delivery(fault="settings", detail=str(error))
        except TimeoutError:
            return Delivery(fault="timeout", detail=f"no answer within {settings.timeout:g} s")
        except Exception as error:  # not its text: it may hold the URL
            return Delivery(fault="internal", detail=f"{type(error).__name__} in its code")
