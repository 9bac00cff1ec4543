"""Count of connections to this node's port that were rejected: a wrong secret or certificate, or no Zenoh at all.

The Python package of Zenoh 1.10 does not count them. But in the kernel's table a connection stays for 60 s after this
side closed it first, as Zenoh does with most that it rejects. The others leave no trace, so the count is a lower bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import sys
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)

LOOK_SECONDS = 20.0
"""Seconds between two looks at the table: what one finds is judged at the next, as the node may be let in by then."""
SETTLE_SECONDS = 300.0
"""Seconds after a node's link began or ended in which nothing from its address is counted. The kernel tries for up to
100 s to close what was cut off in the middle (tcp(7), `tcp_orphan_retries`), and keeps it for 60 s more."""
SHOWN = 3
"""The most addresses that are named."""

_TABLES = Path("/proc/self/net")
_CLOSED_HERE = ("05", "06")
"""States FIN_WAIT2 and TIME_WAIT: this side closed the connection first, and the other one knows. FIN_WAIT1 may be a
node that is cut off."""


class RejectedConnections:
    """The rejected connections of one run. Lives in the daemon's loop."""

    def __init__(self, run: str) -> None:
        self.count: int | None = None
        """Rejected connections so far; None: this node listens on no port, or its machine has no table."""
        self.addresses: list[str] = []
        """Addresses from which they came, the newest first."""
        self._run = run
        self._port: int | None = None
        self._due = 0.0
        self._task: asyncio.Task[None] | None = None
        self._known: set[str] | None = None
        """Connections in the table that need no more judging. None: no look yet since this node listens."""
        self._waiting = set[str]()
        """Connections that the last look found closed."""
        self._linked: dict[str, float] = {}
        """Address of a node -> when a link of it last began or ended."""

    def note_link(self, locator: str, now: float) -> None:
        """Take note that a link to an accepted node began or ended: `tcp/10.0.0.7:41234`, Zenoh's name of the other
        side."""
        host = locator.partition("/")[2].rpartition(":")[0].strip("[]").partition("%")[0]
        with contextlib.suppress(ValueError):  # a host name: of a node to which this one connected
            self._linked[_unmap(ipaddress.ip_address(host))] = now

    def tick(self, port: int | None, now: float) -> None:
        """Look at the table, in a thread, if a look is due. `port`: the one on which this node listens."""
        if port != self._port:
            self._port, self._known, self._due = port, None, now
            self._waiting.clear()
        if port is not None and now >= self._due and (self._task is None or self._task.done()):
            self._due = now + LOOK_SECONDS
            self._task = asyncio.get_running_loop().create_task(self._look(port, now))

    def take(self, connections: Mapping[str, str], now: float) -> None:
        """Judge what is in the table. What the first look finds belongs to the program that had the port before."""
        self.count = self.count or 0
        self._linked = {address: at for address, at in self._linked.items() if now - at < SETTLE_SECONDS}
        if self._known is None:
            self._known = set(connections)
            return
        for remote in self._waiting:
            if (address := _read_address(remote.partition(":")[0])) not in self._linked:
                self._add(address)
        self._known = (self._known | self._waiting) & connections.keys()
        self._waiting = {one for one, state in connections.items() if state in _CLOSED_HERE and one not in self._known}

    async def _look(self, port: int, now: float) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # no descriptor or thread is left: the next look may have one
            connections = await asyncio.to_thread(read_connections, port)
            if connections is not None and port == self._port:
                self.take(connections, now)

    def _add(self, address: str) -> None:
        self.count = (self.count or 0) + 1
        if self.count == 1:
            why = "a wrong secret or certificate?"
            log.warning("run %s: a connection from %s was not let in: %s", self._run, address, why)
        self.addresses = [address, *(one for one in self.addresses if one != address)][:SHOWN]


def read_connections(port: int, tables: Path = _TABLES) -> dict[str, str] | None:
    """Return this network namespace's connections to a local port, in the kernel's notation (proc(5), /proc/net/tcp):
    the other side -> the state here. None where there is no such table, as on macOS. Raises OSError if one cannot be
    read: else its connections would count as new at the next look."""
    found: dict[str, str] | None = None
    local = f":{port:04X}"
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError), open(tables / name, encoding="ascii") as table:
            found = found or {}
            for line in table:
                if local in line and (fields := line.split(None, 4))[1].endswith(local):
                    found[fields[2]] = fields[3]
    return found


@functools.lru_cache(maxsize=1024)
def _read_address(digits: str) -> str:
    """Return the address of hexadecimal digits: `0700000A` is `10.0.0.7`, 32 bits at a time, in native byte order."""
    words = (int(digits[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(digits), 8))
    return _unmap(ipaddress.ip_address(b"".join(words)))


def _unmap(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """Return an address as text: `10.0.0.7` also where an IPv6 socket shows it as `::ffff:10.0.0.7`."""
    return str(getattr(address, "ipv4_mapped", None) or address)
