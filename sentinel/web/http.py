"""HTTP, on loopback by default: /metrics, /-/healthy, /-/ready, /-/reload, the API, the page and /mcp.

Login nodes are shared: everything but /metrics, /-/healthy, /-/ready and the empty page needs the token, which is in
the daemon's state file (mode 0600). The Host header is checked, so that a page of another site in a user's browser
cannot reach this server under its own name (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import hmac
import re
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from email.utils import formatdate
from typing import Any, Protocol

import uvicorn
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sentinel.web import charts, json, page
from sentinel.web.assistants import Assistants, MakeServer
from sentinel.web.visit import Visit

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
HOSTS = ["127.0.0.1", "localhost"]
VIEWS = ("status", "incidents")
SCRIPTS = {"/page.js": page.SCRIPT, "/charts.js": charts.SCRIPT}
PIECE_SECONDS, PIECE_SAMPLES = 0.002, 256
"""Seconds and lines after which a scrape yields to the daemon's loop: a thousand ranks must not wait for all of it. On
a thread it would delay them just as long, through the interpreter's lock."""

Handler = Callable[[Request], Awaitable[Response]]


class Backend(Protocol):
    """What the HTTP server needs from the daemon."""

    def unhealthy(self) -> str:
        """Return why the daemon does not work as it should; "" if it does."""

    def unready(self) -> str:
        """Return why there is nothing to see yet; "" if there is."""

    def reload(self) -> tuple[str, ...]:
        """Load the rule files again. Returns their mistakes; if there are any, the rules do not change."""

    def view(self, what: str) -> Any:
        """Return `status` or `incidents`, as plain data."""

    async def render_list(self) -> str:
        """Return the list of all runs as HTML, made on a thread from the live state of now."""

    async def render_live(self, run_id: str) -> str:
        """Return the changing part of a run's page, made on a thread from the live state of now."""

    async def render_whole(self, run_ids: Sequence[str], zoom: tuple[float, float] | None) -> str:
        """Return a run's whole history as HTML, or two side by side. `zoom`: first and last of the steps that charts
        show in more detail."""

    def families(self) -> Iterator[Metric]:
        """Yield the metric families for Prometheus, each made on demand."""


def application(
    backend: Backend, token: str, allowed: Sequence[str] = HOSTS, *, make_assistants: MakeServer | None = None
) -> Starlette:
    """Return the application. `allowed`: names in a Host header; `make_assistants` makes the server of /mcp."""

    async def metrics(_: Request) -> Response:
        text, until = bytearray(), 0.0
        for family in backend.families():
            for piece in pieces(family):
                text += piece
                if time.perf_counter() > until:
                    await asyncio.sleep(0)
                    until = time.perf_counter() + PIECE_SECONDS
        return Response(bytes(text), media_type=METRICS_TYPE)

    async def healthy(_: Request) -> Response:
        return _state(backend.unhealthy(), "healthy")

    async def ready(_: Request) -> Response:
        return _state(backend.unready(), "ready")

    async def reload(_: Request) -> Response:
        wrong = backend.reload()
        return PlainTextResponse("\n".join(wrong) + "\n" if wrong else "reloaded\n", 400 if wrong else 200)

    async def api(request: Request) -> Response:
        what = request.path_params["what"]
        if what not in VIEWS:
            raise HTTPException(404)
        text = await asyncio.to_thread(json.text, backend.view(what))  # 4 MB for a thousand ranks
        return Response(text + "\n", media_type="application/json")

    async def runs(_: Request) -> Response:
        return _answer_html(await backend.render_list())

    async def live(request: Request) -> Response:
        return _answer_html(await backend.render_live(request.query_params.get("run", "")))

    async def whole(request: Request) -> Response:
        asked = request.query_params
        steps = re.fullmatch(r"(-?\d{1,15})\.\.(-?\d{1,15})", asked.get("steps", ""))
        zoom = (float(steps[1]), float(steps[2])) if steps else None
        return _answer_html(await backend.render_whole(asked.getlist("run")[:2], zoom))

    async def shell(_: Request) -> Response:
        return _answer_html(page.shell())

    async def script(request: Request) -> Response:
        return Response(SCRIPTS[request.url.path], media_type="text/javascript", headers=page.HEADERS)

    async def library(_: Request) -> Response:
        if not charts.is_present():
            raise HTTPException(404)
        return Response(charts.read_library(), media_type="text/javascript", headers=page.HEADERS)

    return Starlette(
        routes=[
            Route("/", shell),
            *(Route(path, script) for path in SCRIPTS),
            Route("/uplot.js", library),
            Route("/runs", _require_token(runs, token)),
            Route("/live", _require_token(live, token)),
            Route("/whole", _require_token(whole, token)),
            Route("/metrics", metrics),
            Route("/-/healthy", healthy),
            Route("/-/ready", ready),
            Route("/-/reload", _require_token(reload, token), methods=["POST"]),
            Route("/api/{what:str}", _require_token(api, token)),
            *([Route("/mcp", _Guarded(Assistants(make_assistants), token))] if make_assistants else []),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(allowed), www_redirect=False)],
        exception_handlers={404: _absent, 405: _other_method},
    )


def exposition(families: Iterable[Metric]) -> bytes:
    """Return families in Prometheus' text format (prometheus.io/docs/instrumenting/exposition_formats)."""
    return generate_latest(_Collected(families))


def pieces(family: Metric) -> Iterator[bytes]:
    """Yield one family in the same format, some lines at a time. It removes the family's samples."""
    samples, family.samples = family.samples, []
    yield (head := exposition([family]))
    for start in range(0, len(samples), PIECE_SAMPLES):
        family.samples = samples[start : start + PIECE_SAMPLES]
        yield exposition([family])[len(head) :]


def hosts(listening: str) -> Sequence[str]:
    """Return the hosts that requests may name: on loopback its names; in a pod any, as its names are not known."""
    return HOSTS if listening.startswith("127.") else ["*"]


def listener(port: int, host: str = "127.0.0.1") -> socket.socket:
    """Return a socket that listens at `port`, or at a free port if that is taken. Raises OSError."""
    for wanted in (port, 0):
        found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, wanted))
            found.listen()
        except OSError:
            found.close()
            if wanted == 0:
                raise
        else:
            return found
    raise AssertionError


class HttpServer:
    """uvicorn inside the daemon's loop.

    uvicorn's own `serve` takes the daemon's signals, and checks ten times a second whether it should end and what the
    Date is, which wakes a processor that training uses. This one sleeps until `end`. uvicorn logs a line for each
    invalid request, with which anyone could fill the disk: only errors are logged.
    """

    def __init__(self, app: Starlette) -> None:
        self._server = uvicorn.Server(
            uvicorn.Config(
                _add_date(app), http=Visit, log_config=None, log_level="error", access_log=False, lifespan="off",
                ws="none", server_header=False, timeout_keep_alive=5, timeout_graceful_shutdown=1,
            )
        )  # fmt: skip
        self._ending = asyncio.Event()

    @property
    def started(self) -> bool:
        return self._server.started

    async def serve(self, listening: socket.socket) -> None:
        """Answer requests until `end`."""
        self._server.config.load()
        self._server.lifespan = self._server.config.lifespan_class(self._server.config)
        await self._server.startup(sockets=[listening])
        await self._ending.wait()
        await self._server.shutdown(sockets=[listening])

    def end(self) -> None:
        """Finish the present answers, and return from `serve`."""
        self._ending.set()


def _add_date(app: ASGIApp) -> ASGIApp:
    """Wrap an application to add the Date header (RFC 9110, section 6.6.1)."""

    async def add_date(scope: Scope, receive: Receive, send: Send) -> None:
        async def add_header(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"date", formatdate(usegmt=True).encode())]
            await send(message)

        await app(scope, receive, add_header)

    return add_date


class _Collected:
    """A collector of families that are collected already, for `generate_latest`."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _answer_html(text: str) -> Response:
    return HTMLResponse(text, headers=page.HEADERS)


def _require_token(handler: Handler, token: str) -> Handler:
    async def require_token(request: Request) -> Response:
        return _refuse(request, token) or await handler(request)

    return require_token


class _Guarded:
    """An application that requires the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (_refuse(Request(scope), self._token) or self._app)(scope, receive, send)


def _refuse(request: Request, token: str) -> Response | None:
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if hmac.compare_digest(given.encode(), token.encode()):
        return None
    text = "this wants the token of the daemon's state file: Authorization: Bearer <token>\n"
    return PlainTextResponse(text, 401, {"WWW-Authenticate": "Bearer"})


def _state(trouble: str, word: str) -> Response:
    return PlainTextResponse(f"{trouble or word}\n", 503 if trouble else 200)


async def _absent(request: Request, _: Exception) -> Response:
    return PlainTextResponse(
        f"nothing is at {request.url.path}; /metrics, /-/healthy, /-/ready and /api/status are\n", 404
    )


async def _other_method(request: Request, error: Exception) -> Response:
    allowed = (getattr(error, "headers", None) or {}).get("Allow", "")
    return PlainTextResponse(f"{request.url.path} takes {allowed}\n", 405, {"Allow": allowed})
