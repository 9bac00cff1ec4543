"""One connection over HTTP, which is no longer than it is used.

Everybody on the node can open some, and each takes a descriptor that ranks need. uvicorn's own stay open until they
have asked, which may be never.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST = 64
"""Connections at a time: a page, Prometheus, and some scripts. One more is closed at once."""
PATIENCE_SECONDS = 30.0
"""A connection on which no request has come for so long is closed, be it that the last one's answer is not read."""


class Visit(H11Protocol):
    """A connection that is closed where too many are open, or where no request comes on it."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The connection is there."""
        super().connection_made(transport)
        if len(self.connections) > MOST:
            transport.abort()
        else:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        self._timer = self.loop.call_later(PATIENCE_SECONDS, self._look, self.cycle)

    def _look(self, last: object) -> None:
        if self.cycle is last:
            self.transport.abort()
        else:
            self._wait()
