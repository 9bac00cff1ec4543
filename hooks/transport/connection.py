"""A connection to the daemon that sends frames and receives messages without waiting. Or a file in the daemon's place.

`SENTINEL_RECORD=FILE` records a run that no daemon watches: the file holds exactly the frames that a daemon would get.
Each is appended whole, so that a run that is killed leaves at most the last one cut off, which a reader skips.
`sentinel replay FILE` judges it.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sentinel import wire
from sentinel._version import __version__
from sentinel.errors import ConfigError, ProtocolError

UNCONFIRMED_BYTES = 4 * 1024 * 1024
"""Most bytes of frames that the daemon has taken but not kept yet.

Above it the oldest are dropped, which loses something only if that daemon is killed before it has kept them.
"""
LARGE_BYTES = 32 * 1024
"""Bytes from which a frame that waits to be kept gets memory pages of its own, which go back to the system.

In the heap, a few seconds of layer statistics would leave holes of megabytes, and the run would seem to leak memory.
"""
_CHUNK = 65536
_CREDENTIALS = struct.Struct("3i")
NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
"""Flag of every send: without it a process with the default action for SIGPIPE would die when the daemon goes away."""


@dataclass(frozen=True, slots=True)
class QueuedFrame:
    """A message, ready to be sent."""

    data: bytes | mmap.mmap
    lasting: bool = True
    seq: int | None = None


class DaemonConnection:
    """A non-blocking Unix socket. Raises OSError if nothing listens at `path`, ProtocolError if another program
    does."""

    def __init__(self, path: Path) -> None:
        self._path, self._greeted = path, False
        self._frames = wire.Frames()
        self._out: deque[QueuedFrame] = deque()
        self._head_sent = 0
        self.keeps: bool | None = None
        """Whether the daemon says what it has kept; None until it has answered."""
        self._sent = self._confirmed = 0
        self._unconfirmed: deque[tuple[int, QueuedFrame]] = deque()
        """(number of the frame on this connection, from 1; frame) of those that the daemon has taken but not kept."""
        self._unconfirmed_bytes = 0
        self._carried: tuple[int, ...] = ()
        self.backlog = 0
        """Bytes that the daemon has not taken yet."""
        self.socket = self._open_socket(path)

    def _open_socket(self, path: Path) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.setblocking(False)
            made.connect(os.fspath(path))
            _check_peer(made, path)
        except BaseException:
            made.close()
            raise
        return made

    def send(self, message: wire.Message, *, lasting: bool = True, seq: int | None = None) -> None:
        """Queue a message. `lasting`: if this connection breaks, it is still worth sending on the next.

        `seq`: the first step that the message is about.
        """
        self._put(QueuedFrame(wire.frame(message), lasting, seq))

    def carry(self, descriptors: tuple[int, ...]) -> None:
        """Pass these file descriptors with the first bytes."""
        self._carried = descriptors

    def adopt(self, frames: Iterable[QueuedFrame]) -> None:
        """Queue what an earlier connection did not deliver."""
        for frame in frames:
            self._put(frame)

    def _put(self, frame: QueuedFrame) -> None:
        self._out.append(frame)
        self.backlog += len(frame.data)

    @property
    def settled(self) -> bool:
        """Whether all that was queued was taken, and kept if the daemon keeps it."""
        return not self.backlog and (self.keeps is False or self._confirmed == self._sent)

    def confirm(self, frames: int) -> None:
        """Note that the daemon has kept the first `frames` frames."""
        self._confirmed = max(self._confirmed, frames)
        while self._unconfirmed and self._unconfirmed[0][0] <= frames:
            self._unconfirmed_bytes -= len(self._unconfirmed.popleft()[1].data)

    def flush(self) -> None:
        """Send as much as the daemon takes now. Raises OSError if the connection is gone."""
        while self._out:
            data = self._out[0].data
            try:
                sent = self._hand_over(memoryview(data)[self._head_sent :])
            except BlockingIOError:
                return
            self.backlog -= sent
            self._head_sent += sent
            if self._head_sent == len(data):
                self._head_sent = 0
                self._took(self._out.popleft())

    def _hand_over(self, part: memoryview) -> int:
        if not self._carried:
            return self.socket.send(part, NO_SIGNAL)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", self._carried))
        sent = self.socket.sendmsg([part], [rights], NO_SIGNAL)  # socket.send_fds drops the flag
        self._carried = ()
        return sent

    def _took(self, frame: QueuedFrame) -> None:
        """Hold a frame that the daemon, or the kernel for it, has taken until it is kept."""
        self._sent += 1
        if frame.lasting and self.keeps is not False:
            self._unconfirmed.append((self._sent, _out_of_the_heap(frame)))
            self._unconfirmed_bytes += len(frame.data)
            while self._unconfirmed_bytes > UNCONFIRMED_BYTES:
                self._unconfirmed_bytes -= len(self._unconfirmed.popleft()[1].data)

    def receive(self) -> Iterator[wire.ToRank]:
        """Yield the messages that have arrived. Raises ConnectionError at the end of the stream, ProtocolError at
        nonsense."""
        try:
            chunk = self.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        if not chunk:
            raise ConnectionResetError("the daemon closed the connection")
        for body in self._frames.feed(chunk):
            if not self._greeted:
                self._check_protocol(body)
            if wire.is_known(body):
                yield wire.to_rank(body)

    def _check_protocol(self, body: bytes) -> None:
        self._greeted = True
        theirs = wire.opening_protocol(body)
        if theirs != wire.PROTOCOL:
            raise ProtocolError(
                f"the daemon at {self._path} speaks protocol {theirs}, this process (training-sentinel {__version__}) "
                f"speaks {wire.PROTOCOL}; install the same version of training-sentinel on both sides"
            )

    def close(self) -> list[QueuedFrame]:
        """Close. Returns the whole frames that are still worth sending, in order."""
        self.socket.close()
        held = [frame for _, frame in self._unconfirmed] if self.keeps is not False else []
        return held + [frame for frame in self._out if frame.lasting]


def _out_of_the_heap(frame: QueuedFrame) -> QueuedFrame:
    if len(frame.data) < LARGE_BYTES or isinstance(frame.data, mmap.mmap):
        return frame
    try:
        pages = mmap.mmap(-1, len(frame.data), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # the process may have no more mappings
        return frame
    pages.write(frame.data)
    return QueuedFrame(pages, frame.lasting, frame.seq)


def _check_peer(connection: socket.socket, path: Path) -> None:
    if sys.platform != "linux":
        return
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid = _CREDENTIALS.unpack(credentials)[1]
    if uid not in (0, os.getuid()):
        raise ProtocolError(f"{path} is served by user {uid}, who is neither you nor root: not used")


LIMIT = 1 << 30
"""Most bytes of one file: some million steps of a model of a hundred layers."""
NAMES = 1000
"""One more than the most files of one name: an older record is never overwritten."""


class Recorder(DaemonConnection):
    """Writes a record in place of a connection to a daemon. Raises ConfigError if the file cannot be written."""

    def _open_socket(self, path: Path) -> socket.socket:
        self.keeps = False
        self._size = 0
        # The sender waits on a socket. Nothing ever arrives on this one.
        ours, self._other = socket.socketpair()
        try:
            self.path, self._file = _new_file(path)
        except BaseException:
            ours.close()
            self._other.close()
            raise
        return ours

    def flush(self) -> None:
        """Append what is queued, up to the limit. Raises ConfigError at the limit, and if the disk is full."""
        data = b"".join(frame.data for frame in self._out)
        if not data:
            return
        if self._size + len(data) > LIMIT:
            self._out.clear()
            raise ConfigError(f"the record {self.path} has reached {LIMIT >> 20} MiB, and ends here")
        self._size += len(data)
        self._out.clear()
        self.backlog = 0
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise ConfigError(f"the record {self.path} cannot be written on: {error.strerror}") from None

    def receive(self) -> Iterator[wire.ToRank]:
        """Yield nothing."""
        return iter(())

    def close(self) -> list[QueuedFrame]:
        """Close the file. Returns no frames: nothing will be sent later."""
        self._other.close()
        super().close()
        os.close(self._file)
        return []


def name_file(template: str, identity: wire.Identity) -> Path:
    """Return the file of a rank: its number replaces `{rank}` in the name, or else is appended if there are several."""
    if "{rank}" in template:
        return Path(template.replace("{rank}", str(identity.rank)))
    return Path(f"{template}.{identity.rank}" if identity.world_size > 1 else template)


def _new_file(path: Path) -> tuple[Path, int]:
    for number in range(1, NAMES):
        chosen = path.with_name(f"{path.name}-{number}") if number > 1 else path
        try:
            return chosen, os.open(chosen, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"SENTINEL_RECORD={path}: cannot be written ({error.strerror})") from None
    raise ConfigError(f"SENTINEL_RECORD={path}: there are {NAMES - 1} records of that name; remove some")
