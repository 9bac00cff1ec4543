"""One connection of the ingest server: what the kernel says of the process at the other end, bytes in, messages out.

The two directions are separate: a process that has ended reads nothing, but what it sent before is still read.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import struct
from pathlib import Path

from sentinel import wire

log = logging.getLogger(__name__)

READ_BYTES = 256 * 1024
"""Read at a time."""
_BACKLOG_LIMIT = 4 * 1024 * 1024
"""Bytes that wait for a peer that does not read, before the connection is dropped: it says hello again."""
_DESCRIPTORS = 4
"""Descriptors that a peer may hand over. The kernel closes the others."""
_FINISH_SECONDS = 5.0
"""For which a peer may take what was still to be sent at the end."""
_UCRED = struct.Struct("3i")
_PEER_PIDFD = 77
"""SO_PEERPIDFD, from Linux 6.5 on (include/uapi/asm-generic/socket.h)."""


class Peer:
    """One connection."""

    def __init__(self, connection: socket.socket) -> None:
        """Takes the connection, and at once hold of the process that made it: later its pid may be another's."""
        connection.setblocking(False)
        self._socket = connection
        self.pid, self.uid = credentials(connection)
        self._process = open_process(connection, self.pid, self.uid)
        self.frames = self.nbytes = 0
        """Received so far; bytes of the last one."""
        self._descriptors: list[int] = []
        self._begun = False
        """The first bytes are there."""
        self._out = bytearray()
        self._sent = asyncio.Event()
        """Nothing is queued."""
        self._sent.set()
        self._deaf = self._closing = self._ended = False
        self._awaited: asyncio.Future[None] | None = None

    async def arrival(self) -> bool:
        """Wait for something to read. False: the connection is closed from this side."""
        loop = asyncio.get_running_loop()
        if not (self._closing or self._ended):
            self._awaited = loop.create_future()
            loop.add_reader(self._socket, self._awake)
            try:
                await self._awaited
            finally:
                loop.remove_reader(self._socket)
                self._awaited = None
        return not self._closing

    def read(self) -> bytes | None:
        """What is there; None where nothing is yet, and nothing but b"" at the end."""
        try:
            if self._begun:
                return self._socket.recv(READ_BYTES)
            data, descriptors, _, _ = socket.recv_fds(self._socket, READ_BYTES, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
            self._begun, self._descriptors = True, list(descriptors)
            return data
        except BlockingIOError:
            return b"" if self._ended else None
        except OSError:
            return b""

    def send(self, message: wire.Message) -> None:
        """Queue a message. A peer that does not read is disconnected."""
        if self._deaf or self._closing:
            return
        if len(self._out) > _BACKLOG_LIMIT:
            log.warning("process %d does not read: connection dropped", self.pid)
            self._deaf = True
            self.close()
            return
        self._out += wire.frame(message)
        self._write()

    def process_ended(self) -> None:
        """Nothing more will come but what is there by now: processes that it forked may hold its socket open."""
        self._ended = True
        self._awake()

    def close(self) -> None:
        """Read no more; what is queued is sent by `finish`."""
        self._closing = True
        self._awake()

    async def finish(self) -> None:
        """Send what is queued, and close."""
        self._closing = True
        try:
            await asyncio.wait_for(self._sent.wait(), _FINISH_SECONDS)
        except TimeoutError:
            pass
        finally:
            self._release()

    def take_process(self) -> int:
        """A pidfd of the process that opened the connection, the caller's from now on; -1: it is not known."""
        process, self._process = self._process, -1
        return process

    def descriptors(self) -> list[int]:
        """Take the descriptors that came with the first bytes; the caller owns them from now on."""
        taken, self._descriptors = self._descriptors, []
        return taken

    def _release(self) -> None:
        """Close the descriptors that were not taken."""
        asyncio.get_running_loop().remove_writer(self._socket)
        for descriptor in (*self.descriptors(), self.take_process()):
            if descriptor >= 0:
                os.close(descriptor)
        self._socket.close()

    def _awake(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)

    def _write(self) -> None:
        try:
            while self._out:
                del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:  # it has gone, which the end of what it sent will say
            self._deaf = True
            self._out.clear()
        loop = asyncio.get_running_loop()
        if self._out and self._sent.is_set():
            self._sent.clear()
            loop.add_writer(self._socket, self._write)
        elif not self._out and not self._sent.is_set():
            self._sent.set()
            loop.remove_writer(self._socket)


def credentials(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end, as the kernel knows it."""
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def open_process(connection: socket.socket, pid: int, uid: int) -> int:
    """A pidfd of the process that made the connection; -1 where there is none, as in a container of its own.

    A kernel that does not hand it out is asked by the pid, which may be another process' by now: that one began later
    than the moment at which it was asked for, or is another user's.
    """
    if pid <= 0:
        return -1
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _PEER_PIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:  # it has ended
            return -1
    began = _began(pid, uid)
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return -1
    if began and began == _began(pid, uid):
        return descriptor
    os.close(descriptor)
    return -1


def _began(pid: int, uid: int) -> str:
    """When a process began, in clock ticks since the boot (proc(5), field 22); "" where it is not this user's."""
    try:
        if os.stat(f"/proc/{pid}").st_uid != uid:
            return ""
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
