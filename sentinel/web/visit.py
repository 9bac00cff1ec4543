"""One HTTP connection, which is closed when it is no longer used.

Every user on the node can open connections, and each takes a descriptor that ranks need. uvicorn's own stay open until
their first request, which may never come.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

MOST = 64
"""Most connections at a time: a page, Prometheus, and some scripts. One more is closed at once."""
PATIENCE_SECONDS = 30.0
"""Seconds without a new request after which a connection is closed, even if the last answer has not been read. While
the answer is still being made, it stays: to read the history of months takes longer."""


class Visit(H11Protocol):
    """A connection that is closed if too many are open, or no request comes."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Handle a new connection."""
        super().connection_made(transport)
        if len(self.connections) > MOST:
            transport.abort()
        else:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        self._timer = self.loop.call_later(PATIENCE_SECONDS, self._look, self.cycle)

    def _look(self, last: RequestResponseCycle | None) -> None:
        if self.cycle is last and (last is None or last.response_started):
            self.transport.abort()
        else:
            self._wait()
