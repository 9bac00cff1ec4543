"""Simulates a slow link to a node that loses connections: forwards TCP from 127.0.0.1 to other addresses.

    python -m bench.proofs._bad_link 9501=198.18.0.1:9478 9502=.. '{"seed": 1, "delay": 0.1, "stall": 0.05, "cut": 0.0}'

`delay`: seconds, each way. `stall`, `cut`: chance per second, for each connection, that it stays open but carries no
more data, or that it is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from typing import Any


class Link:
    """All connections of the link."""

    def __init__(self, terms: dict[str, Any]) -> None:
        self._terms, self._draw = terms, random.Random(terms["seed"])
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, port: int, host: str, target: int) -> None:
        """Forward connections to a local port to a port of `host`."""

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                other_reader, other_writer = await asyncio.open_connection(host, target)
                await self._carry(reader, writer, other_reader, other_writer)
            writer.close()

        server = await asyncio.start_server(carry, "127.0.0.1", port)
        await server.serve_forever()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, other_reader: asyncio.StreamReader,
        other_writer: asyncio.StreamWriter,
    ) -> None:  # fmt: skip
        stalled = asyncio.Event()
        ways = [self._pass_on(reader, other_writer, stalled), self._pass_on(other_reader, writer, stalled)]
        tasks = [asyncio.create_task(way) for way in (*ways, self._disturb(stalled))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            other_writer.close()

    async def _disturb(self, stalled: asyncio.Event) -> None:
        """Stall a connection at random; return when it must be closed."""
        while True:
            await asyncio.sleep(1.0)
            if self._draw.random() < self._terms["stall"]:
                stalled.set()
            if self._draw.random() < self._terms["cut"]:
                return

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stalled: asyncio.Event
    ) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(65536):
            if not stalled.is_set():
                loop.call_later(self._terms["delay"], writer.write, data)


async def main() -> None:
    *routes, terms = sys.argv[1:]
    link = Link(json.loads(terms))
    servers = []
    for route in routes:
        port, _, target = route.partition("=")
        host, _, target_port = target.rpartition(":")
        servers.append(link.serve(int(port), host, int(target_port)))
    await asyncio.gather(*servers)


if __name__ == "__main__":
    asyncio.run(main())
