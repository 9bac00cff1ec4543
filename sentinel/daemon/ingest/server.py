"""The ingest server: a Unix socket with one connection per rank or command line.

It reads frames, checks who is at the other end, and hands on decoded messages. It does not know what they mean.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from pathlib import Path
from typing import Protocol

from sentinel import wire
from sentinel._version import __version__
from sentinel.daemon.ingest.peer import Peer
from sentinel.daemon.ingest.shares import HELD_BYTES, Share, Shares, turn
from sentinel.errors import ConfigError, ProtocolError

log = logging.getLogger(__name__)

_QUEUE = 1024
"""Connections that may wait to be accepted: all ranks of a large node say hello at once."""
_REFUSAL_SECONDS = 1.0
"""Seconds to wait when no descriptor is left."""
_OPENING_SECONDS = 30.0
"""Seconds in which a peer must have sent its first frame. Every peer begins with that at once."""


class Service(Protocol):
    """What the server hands messages to."""

    async def handle_message(self, peer: Peer, message: wire.FromRank) -> None:
        """Handle a message; long work is done in portions, between which others are served.

        Raises ProtocolError if the message does not fit; the peer is then told and disconnected. Raises OSError if this
        machine cannot serve the peer for the moment; it is disconnected, and may come back.
        """

    def drop_peer(self, peer: Peer) -> None:
        """Take note that the connection ended."""


class Listener:
    """The listening socket, and the connections that it accepted."""

    def __init__(self, listening: socket.socket, service: Service, shares: Shares, *, everybody: bool) -> None:
        self._socket, self._service, self._shares, self._everybody = listening, service, shares, everybody
        self._conversations: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Stop listening. Open connections go on."""
        self._accepting.cancel()
        self._socket.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError as error:  # no descriptor left: waiting connections stay in the queue
                log.error("no connection is taken: %s", error)
                await asyncio.sleep(_REFUSAL_SECONDS)
                continue
            peer = Peer(connection)
            conversation = asyncio.create_task(self._converse(peer, self._shares.find_share(peer.uid)))
            self._conversations.add(conversation)  # without a reference it could be garbage-collected
            conversation.add_done_callback(self._conversations.discard)
            await asyncio.sleep(0)  # a queue of a thousand must not delay connected peers

    async def _converse(self, peer: Peer, share: Share) -> None:
        share.connections += 1
        try:
            if not self._everybody and peer.uid not in (os.getuid(), 0):
                raise ProtocolError(f"this daemon belongs to user {os.getuid()}, you are user {peer.uid}")
            if share.connections > self._shares.connections:
                raise ProtocolError(
                    f"user {peer.uid} has {self._shares.connections} connections to this daemon, the most that it "
                    "serves for one user; end runs that are no longer needed"
                )
            await _messages(peer, share, self._service)
        except ProtocolError as error:
            log.warning("process %d: %s", peer.pid, error)
            peer.send(wire.Refused(reason=str(error)))
        except TimeoutError:
            pass  # the peer sent nothing
        except OSError as error:
            log.error("process %d is cut off, and may come back: %s", peer.pid, error)
        except Exception:
            # A fault of ours in one message must not end the ingest of other connections.
            log.exception("process %d: message not handled", peer.pid)
        finally:
            self._service.drop_peer(peer)
            await peer.finish()
            share.connections -= 1


async def serve(path: Path, service: Service, shares: Shares, *, everybody: bool = False) -> Listener:
    """Listen on a socket of mode 0600 in a directory that is ours, or of mode 0666 if all users are served.

    Raises ConfigError if another daemon listens there, or listening fails.
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
    return Listener(listening, service, shares, everybody=everybody)


async def _messages(peer: Peer, share: Share, service: Service) -> None:
    """Hand on the messages of a peer until the connection ends."""
    frames = wire.Frames(wire.OPENING_LIMIT)
    until = asyncio.get_running_loop().time() + _OPENING_SECONDS
    try:
        while True:
            async with asyncio.timeout_at(until if not peer.frames else None):
                if not await peer.arrival():
                    return
            async with turn(share):
                chunk = peer.read()
            if chunk == b"":
                return
            share.held -= frames.nbytes
            try:
                for body in frames.feed(chunk or b""):
                    async with turn(share):
                        await _hand_on(body, peer, service)
                    frames.limit = wire.FRAME_LIMIT
            finally:
                share.held += frames.nbytes
            if share.held > HELD_BYTES:
                raise ConnectionError(f"user {peer.uid} has begun frames of {share.held} bytes and finished none")
    finally:
        share.held -= frames.nbytes


async def _hand_on(body: bytes, peer: Peer, service: Service) -> None:
    if not peer.frames:
        _check_protocol(body)
    peer.frames, peer.nbytes = peer.frames + 1, len(body)
    try:
        message = wire.from_rank(body)
    except ProtocolError:
        if wire.is_known(body):
            raise
        return  # a message of a later version of the same protocol
    await asyncio.sleep(0)  # 16 MB take as long to handle as they took to decode
    await service.handle_message(peer, message)


def _check_protocol(body: bytes) -> None:
    theirs = wire.opening_protocol(body)
    if theirs != wire.PROTOCOL:
        raise ProtocolError(
            f"you speak protocol {theirs}, this daemon (training-sentinel {__version__}) speaks {wire.PROTOCOL}; "
            "install the same version of training-sentinel on both sides"
        )


async def _alive(path: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return False
    writer.close()
    return True
