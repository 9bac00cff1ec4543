"""MCP over HTTP: `/mcp` of the daemon, behind its token, for assistants that are not on this machine.

The tools are those of `sentinel mcp` without --allow-write, on threads of their own. Each request is independent: there
are no sessions that a client could leave open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from sentinel.errors import ConfigError

if TYPE_CHECKING:
    from mcp.server import MCPServer
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

MakeServer = Callable[[], "MCPServer"]


class Assistants:
    """The endpoint `/mcp`. Its server is made at the first request: the SDK takes a second to import."""

    def __init__(self, make_server: MakeServer) -> None:
        self._make_server = make_server
        self._making = asyncio.Lock()
        self._app: ASGIApp | None = None
        self._serving: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._making:
                app = self._app = self._app or await self._begin()
        except ConfigError as error:
            await PlainTextResponse(f"{error}\n", 501)(scope, receive, send)
        else:
            await app(scope, receive, send)

    async def _begin(self) -> ASGIApp:
        from mcp.server.transport_security import TransportSecuritySettings

        server = await asyncio.to_thread(self._make_server)
        # The middleware of the daemon has checked the Host header already.
        security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
        app = server.streamable_http_app(json_response=True, stateless_http=True, transport_security=security)
        ready = asyncio.Event()
        self._serving = asyncio.create_task(_serve(server.session_manager, ready))
        await ready.wait()
        return app


async def _serve(manager: StreamableHTTPSessionManager, ready: asyncio.Event) -> None:
    """Run the session manager, which answers requests, until cancelled."""
    async with manager.run():
        ready.set()
        await asyncio.Event().wait()
