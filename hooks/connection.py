"""One connection to the daemon: frames out, messages in, and never a wait."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from sentinel import wire
from sentinel.errors import ProtocolError

_CHUNK = 65536
_CREDENTIALS = struct.Struct("3i")


class Connection:
    """A non-blocking Unix socket. Raises OSError where nobody serves at `path`, ProtocolError where a stranger does."""

    def __init__(self, path: Path) -> None:
        self._frames = wire.Frames()
        self._out: deque[tuple[bytes, bool]] = deque()
        self._head_sent = 0
        self.backlog = 0
        """Bytes that the daemon has not taken yet."""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.socket.setblocking(False)
            self.socket.connect(os.fspath(path))
            self._check_peer(path)
        except BaseException:
            self.socket.close()
            raise

    def _check_peer(self, path: Path) -> None:
        if sys.platform != "linux":
            return
        credentials = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        uid = _CREDENTIALS.unpack(credentials)[1]
        if uid not in (0, os.getuid()):
            raise ProtocolError(f"{path} is served by user {uid}, who is neither you nor root: not used")

    def send(self, message: wire.Message, *, lasting: bool = True) -> None:
        """Put a message in line. `lasting`: it is still worth sending on the next connection, if this one breaks."""
        frame = wire.frame(message)
        self._out.append((frame, lasting))
        self.backlog += len(frame)

    def adopt(self, frames: list[bytes]) -> None:
        """Put in line what an earlier connection did not get rid of."""
        for frame in frames:
            self._out.append((frame, True))
            self.backlog += len(frame)

    def flush(self) -> None:
        """Hand over as much as the daemon takes now. Raises OSError where the connection is gone."""
        while self._out:
            frame = self._out[0][0]
            try:
                sent = self.socket.send(memoryview(frame)[self._head_sent :])
            except BlockingIOError:
                return
            self.backlog -= sent
            self._head_sent += sent
            if self._head_sent == len(frame):
                self._out.popleft()
                self._head_sent = 0

    def receive(self) -> Iterator[wire.ToRank]:
        """The messages that are there. Raises ConnectionError at the end of the stream, ProtocolError at nonsense."""
        try:
            chunk = self.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        if not chunk:
            raise ConnectionResetError("the daemon closed the connection")
        for body in self._frames.feed(chunk):
            yield wire.to_rank(body)

    def close(self) -> list[bytes]:
        """Close. Returns the whole frames that are still worth sending."""
        self.socket.close()
        return [frame for frame, lasting in self._out if lasting]
