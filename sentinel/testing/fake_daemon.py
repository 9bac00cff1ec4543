"""A daemon of a few threads that welcomes every rank, and keeps what ranks send: no rules, no history, no alerts."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self, TypeVar

from sentinel import wire
from sentinel._version import __version__

WAIT_SECONDS = 20.0
M = TypeVar("M", bound=wire.Message)


class FakeDaemon:
    """Listens on a Unix socket. `sentinel.attach(..., address=daemon.address)` connects to it."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: of the socket; if None, it is in a temporary folder."""
        self._folder = None if path else tempfile.TemporaryDirectory(prefix="sentinel-")
        self.path = path or Path(self._folder.name if self._folder else "") / "d.sock"
        self.answer: Callable[[wire.Hello], bytes] = lambda _: wire.frame(wire.Welcome(version=__version__))
        """Returns the bytes that answer a hello."""
        self.reading = threading.Event()
        """While it is cleared, the daemon accepts connections and does not read."""
        self.reading.set()
        self.messages: list[wire.FromRank] = []
        """All messages received, in order."""
        self.hung_up = False
        """Whether a connection has ended."""
        self._changed = threading.Condition()
        self._peers: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """The socket's address, for `attach(address=)` and `SENTINEL_ADDRESS`."""
        return f"unix:{self.path}"

    def send(self, message: wire.Message) -> None:
        """Send a message to the rank that connected last."""
        self._peers[-1].sendall(wire.frame(message))

    def hang_up(self) -> None:
        """Break all connections."""
        for peer in self._peers:
            try:
                peer.shutdown(socket.SHUT_RDWR)
            except OSError:  # its thread has closed it
                pass

    def close(self) -> None:
        """Break all connections, and accept no more."""
        self.reading.set()
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._threads[0].join(WAIT_SECONDS)  # a connection that it accepts at the last moment must be closed too
        self._listener.close()
        self.hang_up()
        for thread in self._threads:
            thread.join(WAIT_SECONDS)
        if self._folder is not None:
            self._folder.cleanup()

    def wait(self, condition: Callable[[], object]) -> None:
        """Wait until a message makes `condition` true. Raises AssertionError after 20 s."""
        with self._changed:
            if not self._changed.wait_for(condition, WAIT_SECONDS):
                raise AssertionError(f"got {[type(message).__name__ for message in self.messages]}")

    def wait_for_goodbye(self) -> wire.Goodbye:
        """Wait for the last message of a run, after which all others have come."""
        self.wait(lambda: self.list_messages(wire.Goodbye))
        return self.list_messages(wire.Goodbye)[-1]

    def list_messages(self, kind: type[M]) -> list[M]:
        """Return the messages of one kind, in order."""
        return [message for message in list(self.messages) if isinstance(message, kind)]

    def series(self, signal: str, stream: int = 0) -> dict[int, float]:
        """Return seq -> value of one signal of scope rank. `stream`: number of the optimizer."""
        found: dict[int, float] = {}
        for batch in self.list_messages(wire.Batch):
            if batch.stream == stream and signal in batch.columns:
                seqs, column = wire.unpack_column("q", batch.seqs), batch.columns[signal]
                rows = wire.unpack_column("H", column.rows) if column.rows else range(len(seqs))
                found.update(
                    {seqs[row]: value for row, value in zip(rows, wire.unpack_column("d", column.values), strict=True)}
                )
        return found

    def layers(self, signal: str, stream: int = 0) -> dict[int, dict[str, float]]:
        """Return seq -> layer -> value of one signal of scope layer."""
        tables = {table.digest: table for table in self.list_messages(wire.LayerTable)}
        found: dict[int, dict[str, float]] = {}
        for batch in self.list_messages(wire.Batch):
            for block in batch.layers if batch.stream == stream else ():
                names = [layer.name for layer in tables[block.table].layers]
                rows = wire.unpack_column("I", block.layers) if block.layers else range(len(names))
                values = wire.unpack_column("f", block.stats[signal])
                found[block.seq] = {names[row]: value for row, value in zip(rows, values, strict=True)}
        return found

    def seqs(self, stream: int = 0) -> list[int]:
        """Return the seqs of the steps received, in order."""
        return [
            s for b in self.list_messages(wire.Batch) if b.stream == stream for s in wire.unpack_column("q", b.seqs)
        ]

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            self._peers.append(peer)
            self._threads.append(threading.Thread(target=self._serve, args=(peer,), daemon=True))
            self._threads[-1].start()

    def _serve(self, peer: socket.socket) -> None:
        frames = wire.Frames()
        with peer:
            try:
                while self.reading.wait() and (chunk := peer.recv(65536)):
                    for body in frames.feed(chunk):
                        self._take(peer, wire.from_rank(body))
            except OSError:
                pass
        with self._changed:
            self.hung_up = True
            self._changed.notify_all()

    def _take(self, peer: socket.socket, message: wire.FromRank) -> None:
        if isinstance(message, wire.Hello):  # answered before a thread that waits for it can send something else
            try:
                peer.sendall(self.answer(message))
            except OSError:  # a short run has closed its end by now; what it sent can still be read
                pass
        with self._changed:
            self.messages.append(message)
            self._changed.notify_all()
