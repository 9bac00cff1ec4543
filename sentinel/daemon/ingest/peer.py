"""One connection of the ingest server: the process at its other end, bytes in, messages out.

The two directions are independent: a process that has ended reads nothing, but what it sent before is still read.
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
"""Most bytes of one read."""
_BACKLOG_LIMIT = 4 * 1024 * 1024
"""Bytes queued for a peer that does not read above which its connection is dropped; a rank then says hello again."""
_DESCRIPTORS = 4
"""Most descriptors that a peer may hand over. The kernel closes the others."""
_FINISH_SECONDS = 5.0
"""Seconds for a peer to read what is queued at the end."""
_UCRED = struct.Struct("3i")
_PEER_PIDFD = 77
"""The socket option SO_PEERPIDFD, from Linux 6.5 on (include/uapi/asm-generic/socket.h)."""


class Peer:
    """One connection to the daemon's socket."""

    def __init__(self, connection: socket.socket) -> None:
        """Take the connection, and at once a pidfd of its process: later the pid may belong to another process."""
        connection.setblocking(False)
        self._socket = connection
        self.pid, self.uid = credentials(connection)
        self._process = open_process(connection, self.pid, self.uid)
        self.frames = self.nbytes = 0
        """Number of frames received so far; bytes of the last one."""
        self._descriptors: list[int] = []
        self._begun = False
        """Whether the first bytes were read."""
        self._out = bytearray()
        self._sent = asyncio.Event()
        """Set while nothing is queued."""
        self._sent.set()
        self._deaf = self._closing = self._ended = False
        self._awaited: asyncio.Future[None] | None = None

    async def arrival(self) -> bool:
        """Wait for something to read. False: this side has closed the connection."""
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
        """Return the bytes that have arrived; None if there are none yet, b"" at the end."""
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
        """Expect no more than what has arrived by now: processes that the ended one forked may hold its socket open."""
        self._ended = True
        self._awake()

    def close(self) -> None:
        """Stop reading; what is queued is sent by `finish`."""
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
        """Return a pidfd of the process that opened the connection, owned by the caller from now on; -1: unknown."""
        process, self._process = self._process, -1
        return process

    def descriptors(self) -> list[int]:
        """Return the descriptors that came with the first bytes, owned by the caller from now on."""
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
        except OSError:  # the peer has gone, which the end of its bytes will show
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
    """Return (pid, uid) of the process at the other end, as the kernel knows them."""
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def open_process(connection: socket.socket, pid: int, uid: int) -> int:
    """Return a pidfd of the process that opened the connection; -1 if there is none, as from another container.

    A kernel without SO_PEERPIDFD is asked by the pid, which may belong to another process by now. So the start of the
    process, and its user, are compared before and after.
    """
    if pid <= 0:
        return -1
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _PEER_PIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:  # the process has ended
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
    """Return when a process began, in clock ticks since the boot (proc(5), field 22); "" if it is not this user's."""
    try:
        if os.stat(f"/proc/{pid}").st_uid != uid:
            return ""
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
