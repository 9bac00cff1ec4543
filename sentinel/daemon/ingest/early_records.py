"""Reads the records of ranks that ended before this daemon served, as a short script does while the daemon starts.

Such a rank leaves the frames that it would have sent in a file in the daemon's directory. They take the same path as
those of a live rank: through the socket, over a connection of the daemon to itself.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from sentinel.node import locks, paths

log = logging.getLogger(__name__)

AGAIN_SECONDS = 1.0
"""Seconds until a record is sent again if its run was put off, as its history cannot be read at the moment."""
_CHUNK = 65536


class EarlyRecords:
    """Reads the early records in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tasks: dict[Path, asyncio.Task[None]] = {}

    def read(self) -> bool:
        """Begin to read new records; return whether any is being read."""
        for path in self._directory.glob(f"{locks.EARLY}*"):
            if path not in self._tasks:
                self._tasks[path] = asyncio.create_task(self._hand_on(path))
        return not all(task.done() for task in self._tasks.values())

    async def _hand_on(self, path: Path) -> None:
        try:
            content = await asyncio.to_thread(path.read_bytes)
            is_answered = False
            while not is_answered:
                is_answered = await self._send(content)
                await asyncio.sleep(0 if is_answered else AGAIN_SECONDS)
        except OSError as error:
            log.warning("%s: the record of a rank that ended early is not read, and stays (%s)", path, error)
        else:
            path.unlink(missing_ok=True)

    async def _send(self, content: bytes) -> bool:
        """Send a record. Returns whether it was answered: else its run is put off, and must come again."""
        reader, writer = await asyncio.open_unix_connection(paths.socket_path(self._directory))
        try:
            writer.write(content)
            writer.write_eof()
            is_answered = False
            while await reader.read(_CHUNK):  # at its end, everything sent is judged and stored
                is_answered = True
            return is_answered
        finally:
            writer.close()
