"""The ingest server: a Unix socket, one connection a rank or a command line.

Reads frames, checks who is at the other end, and hands decoded messages on. It knows nothing of what they mean.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from pathlib import Path
from typing import Protocol

from sentinel import __version__, wire
from sentinel.errors import ConfigError, ProtocolError

log = logging.getLogger(__name__)

_READ = 256 * 1024
_BACKLOG_LIMIT = 4 * 1024 * 1024
"""Bytes that wait for a peer that does not read, before the connection is dropped: it says hello again."""
_UCRED = struct.Struct("3i")


class Peer:
    """One connection."""

    def __init__(self, writer: asyncio.StreamWriter, pid: int, uid: int) -> None:
        self._writer, self.pid, self.uid = writer, pid, uid
        self.frames = self.nbytes = 0
        """Received so far; bytes of the last one."""

    def send(self, message: wire.Message) -> None:
        """Queue a message. A peer that does not read is cut off, nobody waits for it."""
        if self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size() > _BACKLOG_LIMIT:
            log.warning("process %d does not read: connection dropped", self.pid)
            self._writer.transport.abort()
            return
        self._writer.write(wire.frame(message))

    def close(self) -> None:
        """Send what is queued, then close."""
        self._writer.close()


class Service(Protocol):
    """What the server hands messages to."""

    def received(self, peer: Peer, message: wire.FromRank) -> None:
        """A message arrived. Raises ProtocolError where it does not fit; the peer is then told and cut off."""

    def disconnected(self, peer: Peer) -> None:
        """The connection ended."""


async def serve(path: Path, service: Service, *, everybody: bool = False) -> asyncio.Server:
    """Listen on a socket of mode 0600 in a directory that is ours; of mode 0666, if all users are served.

    Raises ConfigError where it is taken.
    """
    if await _alive(path):
        raise ConfigError(f"{path}: a daemon serves here already; stop it first, or use another --directory")
    path.unlink(missing_ok=True)

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _converse(reader, writer, service, everybody)

    mask = os.umask(0o111 if everybody else 0o177)
    try:
        return await asyncio.start_unix_server(connection, path, limit=_READ)
    except OSError as error:
        raise ConfigError(f"{path}: cannot listen there ({error.strerror})") from None
    finally:
        os.umask(mask)


async def _converse(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, service: Service, everybody: bool
) -> None:
    pid, uid = credentials(writer.get_extra_info("socket"))
    peer = Peer(writer, pid, uid)
    if not everybody and uid not in (os.getuid(), 0):
        peer.send(wire.Refused(reason=f"this daemon belongs to user {os.getuid()}, you are user {uid}"))
        writer.close()
        return
    try:
        await _messages(reader, peer, service)
    except ProtocolError as error:
        log.warning("process %d: %s", pid, error)
        peer.send(wire.Refused(reason=str(error)))
    except ConnectionError:
        pass  # the peer is gone, which `disconnected` says
    except Exception:
        # A fault of ours in one message must not end the ingest of the others.
        log.exception("process %d: message not handled", pid)
    finally:
        service.disconnected(peer)
        writer.close()


async def _messages(reader: asyncio.StreamReader, peer: Peer, service: Service) -> None:
    frames, first = wire.Frames(), True
    while chunk := await reader.read(_READ):
        for body in frames.feed(chunk):
            if first:
                _check_protocol(body)
                first = False
            peer.frames, peer.nbytes = peer.frames + 1, len(body)
            try:
                message = wire.from_rank(body)
            except ProtocolError:
                if wire.is_known(body):
                    raise
                continue  # of a later version of the same protocol
            service.received(peer, message)


def _check_protocol(body: bytes) -> None:
    theirs = wire.opening_protocol(body)
    if theirs != wire.PROTOCOL:
        raise ProtocolError(
            f"you speak protocol {theirs}, this daemon (training-sentinel {__version__}) speaks {wire.PROTOCOL}; "
            "install the same version of training-sentinel on both sides"
        )


def credentials(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end, as the kernel knows it."""
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


async def _alive(path: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return False
    writer.close()
    return True
