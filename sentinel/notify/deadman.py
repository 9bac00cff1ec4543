"""Send heartbeats to a dead man's switch.

At each interval a server elsewhere gets a heartbeat as long as all runs are watched, and raises the alarm if it is
missing. None is sent while the daemon is blind. This runs on the loop that judges the steps, so that it cannot outlive
that loop. Any server that takes a POST will do: healthchecks.io, Better Stack, Opsgenie heartbeats, Dead Man's Snitch,
Uptime Kuma.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sentinel.config.settings import HeartbeatSettings
from sentinel.notify.periodic import Periodic, Request

log = logging.getLogger(__name__)


class Deadman(Periodic[HeartbeatSettings]):
    """Sends heartbeats."""

    def __init__(self, settings: HeartbeatSettings | None, blind: Callable[[], str]) -> None:
        """`blind` returns why the daemon does not see what it should; empty where it does."""
        super().__init__(settings)
        self._blind = blind
        self.sent = self.withheld = self.failed = 0
        self.trouble = ""
        """Why the last heartbeat was not sent, or did not arrive."""

    def status(self) -> dict[str, Any] | None:
        """Return counts and trouble for `sentinel status`; None: there is no heartbeat in the settings."""
        if self.settings is None:
            return None
        return {"sent": self.sent, "withheld": self.withheld, "failed": self.failed, "trouble": self.trouble}

    async def send(self, settings: HeartbeatSettings) -> None:
        """Send a heartbeat, unless the daemon is blind."""
        former, blind = self.trouble, self._blind()
        if blind:
            self.withheld += 1
            self.trouble = f"withheld: {blind}"
        else:
            delivery = await self.post(lambda: _make_request(settings))
            self.sent += delivery.fault is None
            self.failed += delivery.fault is not None
            self.trouble = delivery.detail
        if self.trouble != former:
            log.warning("heartbeat: %s", self.trouble or "sent again")


def _make_request(settings: HeartbeatSettings) -> Request:
    return settings.address(), b"{}", settings.authorization(), settings.timeout
