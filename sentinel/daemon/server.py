"""The ingest server: a Unix socket, one connection a rank or a command line.

Reads frames, checks who is at the other end, and hands decoded messages on. It knows nothing of what they mean.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
import struct
from collections import Counter
from pathlib import Path
from typing import Protocol

from sentinel import __version__, wire
from sentinel.errors import ConfigError, ProtocolError

log = logging.getLogger(__name__)

_READ = 256 * 1024
_BACKLOG_LIMIT = 4 * 1024 * 1024
"""Bytes that wait for a peer that does not read, before the connection is dropped: it says hello again."""
_QUEUE = 1024
"""Connections that may wait to be taken: all ranks of a large node say hello at once."""
_DESCRIPTORS = 4
"""Descriptors that a peer may hand over. The kernel closes the others."""
_REFUSAL_SECONDS = 1.0
_OPENING_SECONDS = 30.0
"""Seconds in which a peer must say who it is. Every peer begins with that at once."""
_OF_A_USER = 4096
"""Connections at a time: where a service serves all users of a node, none of them takes the place of the others."""
_UCRED = struct.Struct("3i")


class Peer:
    """One connection."""

    def __init__(self, writer: asyncio.StreamWriter, pid: int, uid: int, descriptors: list[int]) -> None:
        self._writer, self.pid, self.uid = writer, pid, uid
        self._descriptors = descriptors
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

    def descriptors(self) -> list[int]:
        """Those that came with the first bytes: they are the caller's from now on."""
        taken, self._descriptors = self._descriptors, []
        return taken

    def let_go(self) -> None:
        """Close the descriptors that nobody took."""
        for descriptor in self.descriptors():
            os.close(descriptor)


class Service(Protocol):
    """What the server hands messages to."""

    def received(self, peer: Peer, message: wire.FromRank) -> None:
        """A message arrived. Raises ProtocolError where it does not fit; the peer is then told and cut off."""

    def disconnected(self, peer: Peer) -> None:
        """The connection ended."""


class Listener:
    """The listening socket, and the conversations that it led to."""

    def __init__(self, listening: socket.socket, service: Service, *, everybody: bool) -> None:
        self._socket, self._service, self._everybody = listening, service, everybody
        self._conversations: set[asyncio.Task[None]] = set()
        self._open = Counter[int]()
        """Connections of each user."""
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Listen no more. Conversations go on."""
        self._accepting.cancel()
        self._socket.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._socket)
                pid, uid = credentials(connection)
            except OSError as error:  # no descriptor left: those who wait stay in the queue
                log.error("no connection is taken: %s", error)
                await asyncio.sleep(_REFUSAL_SECONDS)
                continue
            if self._open[uid] >= _OF_A_USER:
                connection.close()
                continue
            self._open[uid] += 1
            conversation = asyncio.create_task(_converse(connection, pid, uid, self._service, self._everybody))
            self._conversations.add(conversation)  # or nobody would, and it could be collected
            conversation.add_done_callback(functools.partial(self._ended, uid))

    def _ended(self, uid: int, conversation: asyncio.Task[None]) -> None:
        self._conversations.discard(conversation)
        self._open[uid] -= 1


async def serve(path: Path, service: Service, *, everybody: bool = False) -> Listener:
    """Listen on a socket of mode 0600 in a directory that is ours; of mode 0666, if all users are served.

    Raises ConfigError where it is taken.
    """
    if await _alive(path):
        raise ConfigError(f"{path}: a daemon serves here already; stop it first, or use another --directory")
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.setblocking(False)
    mask = os.umask(0o111 if everybody else 0o177)
    try:
        listening.bind(str(path))
        listening.listen(_QUEUE)
    except OSError as error:
        listening.close()
        raise ConfigError(f"{path}: cannot listen there ({error.strerror})") from None
    finally:
        os.umask(mask)
    return Listener(listening, service, everybody=everybody)


async def _converse(connection: socket.socket, pid: int, uid: int, service: Service, everybody: bool) -> None:
    connection.setblocking(False)
    stranger = not everybody and uid not in (os.getuid(), 0)
    until = asyncio.get_running_loop().time() + _OPENING_SECONDS
    try:
        # A stranger is told so without being listened to.
        async with asyncio.timeout_at(until):
            first, descriptors = (b"", []) if stranger else await _opening(connection)
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=_READ)
    except OSError:  # of which TimeoutError is one
        connection.close()
        return
    except asyncio.CancelledError:
        connection.close()
        raise
    peer = Peer(writer, pid, uid, descriptors)
    try:
        if stranger:
            raise ProtocolError(f"this daemon belongs to user {os.getuid()}, you are user {uid}")
        await _messages(first, reader, peer, service, until)
    except ProtocolError as error:
        log.warning("process %d: %s", pid, error)
        peer.send(wire.Refused(reason=str(error)))
    except (ConnectionError, TimeoutError):
        pass  # the peer is gone, which `disconnected` says, or was never there
    except Exception:
        # A fault of ours in one message must not end the ingest of the others.
        log.exception("process %d: message not handled", pid)
    finally:
        peer.let_go()
        writer.close()
        service.disconnected(peer)


async def _opening(connection: socket.socket) -> tuple[bytes, list[int]]:
    """The first bytes, and the descriptors that came with them: asyncio's own streams would drop those."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(connection, _READ, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
            return data, list(descriptors)
        except BlockingIOError:
            readable = loop.create_future()
            loop.add_reader(connection, _set, readable)
            try:
                await readable
            finally:
                loop.remove_reader(connection)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _messages(chunk: bytes, reader: asyncio.StreamReader, peer: Peer, service: Service, until: float) -> None:
    """`until`: by the loop's clock, when the first message is to be there."""
    frames, first = wire.Frames(), True
    while chunk:
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
        async with asyncio.timeout_at(until if first else None):
            chunk = await reader.read(_READ)


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
