"""Send one POST over HTTP, and interpret its answer. Every receiver that speaks HTTP sends through this.

No redirects (a receiver that moved is reported, not followed), certificates verified, one connection per message, the
environment's proxies. The status and Retry-After of an answer are read, and no more of its body than is asked for: it
may be anything, and endless. No URL and no text of the other side gets into a Delivery or a log.
"""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import logging
import os
import socket
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sentinel._version import __version__
from sentinel.notify import DELIVERED, Delivery

if TYPE_CHECKING:
    import httpx2

RETRIED = frozenset({408, 425, 429})
"""The client errors that mean "later" (RFC 9110, 6585, 8470). The others are permanent."""

ANSWER_BYTES = 64 * 1024
"""Most bytes that are read of an answer."""

logging.getLogger("httpx2").setLevel(logging.WARNING)  # its INFO lines hold the URL, which is a secret


class Poster:
    """An HTTP client that is created in a thread when it is first needed: reading the system's certificates takes
    50 ms, and loading httpx2 more than that. Commands that only read settings need not wait for it."""

    def __init__(self, timeout: float, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        """`timeout`: seconds for each of connecting, writing and reading. `transport`: for tests."""
        self._timeout, self._transport = timeout, transport
        self._client: httpx2.AsyncClient | None = None

    async def post(self, url: str, body: bytes, headers: Mapping[str, str] = {}) -> Delivery:
        """Send JSON once."""
        delivery, _ = await self.ask(url, body, headers, 0)
        return delivery

    async def ask(
        self, url: str, body: bytes, headers: Mapping[str, str] = {}, limit: int = ANSWER_BYTES
    ) -> tuple[Delivery, bytes]:
        """Send JSON once; also return the first `limit` bytes of the answer's body where it was delivered."""
        if self._client is None:
            self._client = await asyncio.to_thread(self._make_client)
        import httpx2

        content = {
            "Content-Type": "application/json",
            "User-Agent": f"training-sentinel/{__version__}",
            "Accept-Encoding": "identity",  # 200 kB of gzip may be 200 MB, unpacked on the daemon's loop
            **headers,
        }
        try:
            async with self._client.stream("POST", url, content=body, headers=content) as response:
                found = verdict(response.status_code, response.headers.get("Retry-After", ""))
                return found, await _beginning(response, limit) if limit and found.fault is None else b""
        except httpx2.TimeoutException:
            return Delivery(fault="timeout", detail=f"no answer within {self._timeout:g} s", retry=True), b""
        except (httpx2.TransportError, ssl.SSLError, OSError) as error:
            return Delivery(fault="connection", detail=cause(error), retry=True), b""
        except (httpx2.InvalidURL, ValueError):
            return Delivery(fault="settings", detail="its URL is not valid", retry=False), b""

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()

    def _make_client(self) -> httpx2.AsyncClient:
        import httpx2

        return httpx2.AsyncClient(
            timeout=self._timeout,
            follow_redirects=False,
            limits=httpx2.Limits(max_keepalive_connections=0),
            transport=self._transport,
        )


async def _beginning(response: httpx2.Response, limit: int) -> bytes:
    found = b""
    async for chunk in response.aiter_raw():
        found += chunk
        if len(found) >= limit:
            break
    return found[:limit]


def verdict(status: int, retry_after: str = "") -> Delivery:
    """Return what a status means: 2xx is delivered, whatever the body says."""
    if 200 <= status < 300:
        return DELIVERED
    after = seconds_after(retry_after)
    if status == 429:
        return Delivery(fault="rate limited", detail="it asks for fewer messages (429)", retry=True, after=after)
    if status >= 500:
        return Delivery(fault="server error", detail=f"it answers {status}", retry=True, after=after)
    if 300 <= status < 400:
        return Delivery(fault="rejected", detail=f"it redirects ({status}), which is not followed: name its new URL")
    return Delivery(fault="rejected", detail=f"it answers {status}", retry=status in RETRIED, after=after)


def seconds_after(header: str) -> float:
    """Return the seconds from now of a Retry-After header, a number of seconds or a date (RFC 9110, 10.2.3); 0 where it
    is neither."""
    if header.isascii() and header.strip().isdecimal():
        return float(header)
    try:
        when = email.utils.parsedate_to_datetime(header)
    except (ValueError, OverflowError):  # not a date, or an hour or a time zone that does not exist
        return 0.0
    if when.tzinfo is None:
        when = when.replace(tzinfo=datetime.UTC)
    return max((when - datetime.datetime.now(datetime.UTC)).total_seconds(), 0.0)


def cause(error: BaseException | None) -> str:
    """Return why there was no answer, in the system's words or ours. Never the error's text: it may hold the URL."""
    import httpx2

    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"its certificate does not verify: {error.verify_message}"
        if isinstance(error, OSError) and error.errno and not isinstance(error, ssl.SSLError | socket.gaierror):
            return os.strerror(error.errno).lower()
        if isinstance(error, socket.gaierror):
            return "its host name is not known"
        if isinstance(error, httpx2.RemoteProtocolError):
            return "the connection was closed before an answer"
        error = error.__cause__ or error.__context__
    return "no connection"
